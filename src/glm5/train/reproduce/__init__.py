"""The report's comparisons, run again at a size that one can afford: Tables 1, 2 and 6.

    settings   how large each comparison is            published  the report's own figures
    cells      trains every cell of a table once       verdict    what a difference over seeds proves
    table1, table2, table6   the cells, what is measured on each, and the claims that are judged

Read next: `verdict`, then `table1`; `glm5.cli.reproduce` is the command.
"""
