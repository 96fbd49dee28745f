"""A compressor of your own, with CHOCO-SGD: one byte per entry, and a scale for the whole vector.

    torchrun --standalone --nproc-per-node 4 examples/own_compressor.py

A compressor says how long a message is, writes it, and adds what it means to a vector. Its size must follow from the
length of the vector alone, so that the receiver knows it. CHOCO-SGD sends compressed differences, so that the error of
compression vanishes as ranks agree.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gossip_modules import Choco, GossipDataParallel
from gossip_modules.compression import Compressor


class Int8(Compressor):
    """C(x) = scale * round(x / scale) with scale = max |x| / 127: a quarter of the bytes of float32."""

    def num_bytes(self, d: int, dtype: torch.dtype) -> int:
        """Eight bytes of scale, then one byte for each entry."""
        return 8 + d

    def _encode(self, x: Tensor, message: Tensor, t: int) -> None:
        scale = x.abs().max().double().clamp(min=1e-30) / 127
        message[:8].view(torch.float64).copy_(scale)
        message[8:].view(torch.int8).copy_((x / scale.to(x.dtype)).round())

    def _add(self, message: Tensor, target: Tensor, dtype: torch.dtype, alpha: float) -> None:
        scale = message[:8].view(torch.float64) * alpha
        target += message[8:].view(torch.int8).to(target.dtype) * scale.to(target.dtype)

    def __repr__(self) -> str:
        return "Int8()"  # all settings: ranks compare it at the start


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Linear(50, 1, bias=False)
model = GossipDataParallel(net, algorithm=Choco(Int8(), step_size=0.5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
draws = torch.Generator().manual_seed(1 + rank)
for _ in range(200):
    x = torch.randn(16, 50, generator=draws)
    optimizer.zero_grad()
    mse_loss(model(x), x.sum(dim=1, keepdim=True)).backward()
    optimizer.step()
with model.averaged():
    error = (net.weight - 1).abs().max().item()
num_neighbours = min(2, dist.get_world_size() - 1)  # on a ring, the graph that CHOCO takes unless it is given another
num_bytes = model.comm_stats()["bytes_sent"] / (200 * num_neighbours)
if rank == 0:
    print(f"largest error of the averaged weights {error:.1e}; {num_bytes:.0f} bytes per message, 200 uncompressed")
model.close()
dist.destroy_process_group()
