"""Claims: figures and words of hand-written pages, each computed from CSV files of benchmarks/results/.

    python -m benchmarks.claims            # writes all of them into the pages
    python -m benchmarks.claims --check    # exit code 1 where a page is not what the CSV files say
    python -m benchmarks.claims --list     # name, text, files, rows and pages of each claim

A claim has a name, such as `elastic.slowest`, in the file of its subject. In a page of Markdown its text is between two
comments that no reader sees, in a line of prose, in bold text or in a cell of a table:

    The slowest step took <!--claim elastic.slowest-->113 ms<!--/-->.

A claim of several lines has each comment in a line of its own. In texts of `benchmarks.pages` a claim is
`{elastic.slowest}`. No line of prose may begin with a comment: Markdown would take the line for HTML.
"""
