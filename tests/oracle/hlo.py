"""Host. Reads compiled programs for what they must not do: write a large array anew."""

import math
import re

MOVE = re.compile(r"(ROOT )?%(\S+) = \(?\w+\[([\d,]+)\]\S* (?:copy|copy-start|convert|transpose|bitcast-convert)\(")


def large_moves(hlo, sizes):
    """Every instruction that writes an array of one of these sizes anew. Inside a fusion only what it returns is
    written: a gather that converts what it reads holds a convert of the whole table, and computes the gathered rows
    alone."""
    fused = set(re.findall(r"fusion\(.*calls=%([\w.-]+)", hlo))
    found = []
    for computation in re.split(r"\n(?=\S)", hlo):
        name = re.match(r"(?:ENTRY )?%([\w.-]+)", computation)
        root = re.search(r"ROOT .* tuple\(.*", computation)
        returned = re.findall(r"%[\w.-]+", root[0]) if root else []
        for line in computation.splitlines():
            move = MOVE.search(line)
            if move is None or math.prod(map(int, move[3].split(","))) not in sizes:
                continue
            if name is None or name[1] not in fused or move[1] or f"%{move[2]}" in returned:
                found.append(line.strip()[:160])
    return found
