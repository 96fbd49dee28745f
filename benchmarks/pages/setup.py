"""What the measurements share: the end of the index, to which the pages of studies link."""

SETUP = """\
## How the figures are measured { #setup }

Compare ratios within a page: absolute times depend on the machine. `benchmarks/README.md` says how you run the
benchmarks.

- Figures are means over the seeds whose number a table has. "Lowest" and "highest" are single seeds, and a band in a
  picture spans the seeds.
- Thresholds are compared before figures are rounded.

### Studies in the Lab

All workers train in one process, in the [Lab](../guides/lab.md). Unless a page says otherwise:

- Accuracies and losses are those of the averaged model on a test split. A gap is the mean over the seeds of both.
- The learning rate rises in the first tenth of the steps and falls linearly to zero. Each method has the best rate of
  short trainings on a validation split, with the first seed. The grid stands below all rows.
- Bytes are those that a worker sends in float32, and all-reduce is a ring. Times are those of the Lab's clock.

| task | data | training |
|---|---|---|
| CIFAR-10 | images of 16 pixels, mirrored half of the time; 5,000 for validation, 10,000 for the test | \
workers draw from all images; SGD, Nesterov momentum 0.9, weight decay 1e-4; 2 convolutions of patches, a linear layer |
| drawn digits | 6 x 6 pixels, drawn from a seed; 6,144 for training, 1,024 for each other split | \
workers draw from all images; SGD, Nesterov momentum 0.9, weight decay 1e-4; two linear layers, 2,410 parameters |
| text | characters of the sources of Python's standard library, 32 in a sequence; the last two twentieths for \
validation and test | AdamW, betas (0.9, 0.95), weight decay 0.1; a decoder |

Compare methods only: large models have other accuracies.

Set `OMP_NUM_THREADS=1`, and for CIFAR-10 `GOSSIP_DATA`: the folder with the archive cifar10-jpeg.tar.gz. The column
`data` of a CSV file begins the SHA-256 of its data.

### Emulated hosts

A host is a network namespace of one machine with two cores, with a shaped link. Computation is a sleep; messages,
copies and optimizers are real.

### Jobs with a membership

Workers with a [membership](../guides/elasticity.md) are processes on one machine with two cores. A kill is a SIGKILL. A
worker without a heartbeat for its deadline is excluded.
"""
