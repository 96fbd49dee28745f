"""Former names of attributes and arguments: they work, and say the new one."""

import pytest
from torch import nn

from gossip_modules.extend import FlatBuffer, FlatVector, PushPull
from gossip_modules.flat.renamed import Renamed, renamed_argument


class _Point:
    length = 3
    size = Renamed("length")

    @renamed_argument("size", "length")
    def scaled(self, *, length: int) -> int:
        """Length times length."""
        return self.length * length


def test_a_renamed_attribute_is_the_new_one() -> None:
    with pytest.warns(DeprecationWarning, match=r"^_Point.size is now length; the old name will go$") as caught:
        assert _Point().size == 3
    assert caught[0].filename == __file__
    point = _Point()
    with pytest.warns(DeprecationWarning, match=r"^_Point.size is now length"):
        point.size = 4
    assert point.length == 4


def test_a_renamed_argument_is_the_new_one() -> None:
    assert _Point().scaled(length=2) == 6
    with pytest.warns(
        DeprecationWarning, match=r"^_Point.scaled\(size=\) is now length=; the old name will go$"
    ) as caught:
        assert _Point().scaled(size=2) == 6  # type: ignore[call-arg]
    assert caught[0].filename == __file__
    with pytest.raises(TypeError, match=r"scaled\(\) got size= and length=, expected length= alone"):
        _Point().scaled(size=2, length=2)  # type: ignore[call-arg]


def test_public_classes_have_their_former_names() -> None:
    with pytest.warns(DeprecationWarning, match=r"FlatBuffer.__init__\(num_slices=\) is now num_shards="):
        buffer = FlatBuffer(nn.Linear(2, 1), num_slices=2)  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match=r"FlatBuffer.num_slices is now num_shards"):
        assert buffer.num_slices == 2
    vector = buffer.vector
    with pytest.warns(DeprecationWarning, match=r"FlatVector.weight is now push_sum_weight"):
        assert vector.weight is vector.push_sum_weight
    with pytest.warns(DeprecationWarning, match=r"FlatVector.slice is now shard"):
        assert vector.slice(1, 2) is vector.shard(1, 2)
    with pytest.warns(DeprecationWarning, match=r"FlatVector.shard\(num_slices=\) is now num_shards="):
        assert vector.shard(1, num_slices=2) is vector.shard(1, 2)  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match=r"FlatVector.__init__\(weight=\) is now push_sum_weight="):
        FlatVector(vector.layout, vector.raw, weight=vector.push_sum_weight)  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match=r"FlatVector.pieces is now chunks"):
        assert vector.pieces() == vector.chunks()
    with pytest.warns(DeprecationWarning, match=r"PushPull.__init__\(piece_bytes=\) is now chunk_bytes="):
        gossiper = PushPull(piece_bytes=512)  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match=r"PushPull.piece_bytes is now chunk_bytes"):
        assert gossiper.piece_bytes == gossiper.chunk_bytes == 512
