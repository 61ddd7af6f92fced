"""The numbers of the processes of one core, of which there are `stages` times `tensor`.

Rank ``stage * tensor + index`` has part `index` of the layers of its stage. Processes are numbered in another order,
because the one that leads, number 0, has the sampler and the user's functions, and must be of the last stage: it is the
first rank there.
"""


def rank_of(number: int, stages: int, tensor: int) -> int:
    """The rank of process `number`."""
    return (number - tensor) % (stages * tensor)


def number_of(rank: int, stages: int, tensor: int) -> int:
    """The process that has this rank."""
    return (rank + tensor) % (stages * tensor)
