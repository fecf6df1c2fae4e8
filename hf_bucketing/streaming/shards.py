"""How the shards of a stream fall to processes and their workers, and what it costs where they do not divide."""

from __future__ import annotations


def warn_of_shards(num_shards: int, *, num_processes: int, num_workers: int) -> list[str]:
    """Return what is slow about sharing a stream, one sentence each; none if every worker reads as many shards.

    Where the shards divide among the processes, each process reads its own; else datasets lets every process read all
    rows and keep every n-th. The workers of a process share out the shards that it reads.

    Args:
        num_shards (`int`): Files, or parts of files.
        num_processes (`int`): Training processes.
        num_workers (`int`): Workers of each of them; with 0, the process reads itself.

    Example:
        >>> warn_of_shards(8, num_processes=2, num_workers=4)
        []
        >>> print(*warn_of_shards(2, num_processes=1, num_workers=4))
        2 of the 4 workers of each process have no shard to read: give `dataloader_num_workers=2`, or make 4 shards.
    """
    workers = max(1, num_workers)
    divides = num_shards % num_processes == 0
    per_process = num_shards // num_processes if divides else num_shards
    enough = num_processes * workers
    make = f"make {-(-num_shards // enough) * enough} shards"
    if not divides:
        fewer = max(count for count in range(1, num_processes + 1) if num_shards % count == 0)
        return [
            f"The {num_shards} shards do not divide among {num_processes} processes, so each reads all of them and "
            f"keeps one row in {num_processes}: reading takes {num_processes} times as long. Run "
            f"{fewer} process{'es' if fewer > 1 else ''}, or {make}."
        ]
    if per_process < workers:
        return [
            f"{workers - per_process} of the {workers} workers of each process have no shard to read: give "
            f"`dataloader_num_workers={per_process}`, or {make}."
        ]
    if per_process % workers:
        fewer = max(count for count in range(1, workers) if per_process % count == 0)
        return [
            f"The {per_process} shards of each process do not divide among its {workers} workers: "
            f"{workers - per_process % workers} of them read {per_process // workers} and then wait for the others, "
            f"which read {per_process // workers + 1}. Give "
            f"`dataloader_num_workers={fewer}`, or {make}."
        ]
    return []
