"""The layout of a mesh: the sizes of its axes, as data."""

import attrs
from attrs.validators import ge

from nrl.arguments import checked

__all__ = ["Layout"]


@checked("Layout")
@attrs.frozen
class Layout:
    """The axes of a mesh. Their product ``dp x tp x cp x pp`` is the number of its slots.

    Algorithms never see it. The same program gives the same numbers, to rounding, in any layout; in this process
    (``cluster("local")``) one copy stands for all axes, and batches are split along dp as anywhere.

    Args:
        dp: data parallel: copies of the model that work on parts of a batch.
        shard: how many of dp hold one copy together, each a part; None: all of them.
        tp: tensor parallel: every layer is split.
        cp: context parallel: every row is split.
        pp: pipeline parallel: layers are split into stages.
        ep: expert parallel: the experts of a layer are spread over this many processes, taken from dp, cp and tp.
        vp: virtual pipeline parallel: stages that each process holds.

    Raises:
        ValueError: an axis is less than 1; ``shard`` does not divide dp, or ``ep`` dp x cp x tp; or ``vp`` is more
            than 1 without a pipeline.

    >>> Layout(dp=4, tp=2).slots
    8
    """

    dp: int = attrs.field(default=1, validator=ge(1))
    shard: int | None = attrs.field(default=None, validator=attrs.validators.optional(ge(1)))
    tp: int = attrs.field(default=1, validator=ge(1))
    cp: int = attrs.field(default=1, validator=ge(1))
    pp: int = attrs.field(default=1, validator=ge(1))
    ep: int = attrs.field(default=1, validator=ge(1))
    vp: int = attrs.field(default=1, validator=ge(1))

    def __attrs_post_init__(self) -> None:
        if self.shard is not None and self.dp % self.shard:
            raise ValueError(
                f"Layout: shard={self.shard} does not divide dp={self.dp}; each copy is shared by as many processes"
            )
        if (self.dp * self.cp * self.tp) % self.ep:
            raise ValueError(
                f"Layout: ep={self.ep} does not divide dp x cp x tp = {self.dp * self.cp * self.tp}, from which its "
                "processes are taken"
            )
        if self.vp > 1 and self.pp == 1:
            raise ValueError(f"Layout: vp={self.vp} splits the stages of a pipeline, and pp=1 has none; raise pp")

    @property
    def slots(self) -> int:
        """Number of slots that the layout takes."""
        return self.dp * self.tp * self.cp * self.pp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of a process on each axis; ranks run over (pp, dp, cp, tp), the last one fastest.

        >>> Layout(dp=2, tp=2).coordinates(3)
        {'pp': 0, 'dp': 1, 'cp': 0, 'tp': 1}
        """
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return {"pp": pp, "dp": dp, "cp": cp, "tp": tp}

    def shard_leader(self, shard: int) -> int:
        """Return the rank that gives the results of a shard: the first of the last stage, which has full outputs.

        >>> Layout(dp=2, tp=2, pp=2).shard_leader(1)
        6
        """
        return ((self.pp - 1) * self.dp + shard) * self.cp * self.tp
