"""A round in flight in a checkpoint: its vectors, and the reply to its first request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import GeneratorType as Generator
from typing import Any

from torch import Tensor

from ..flat.vector import FlatVector
from .memory import Memory
from .messages import MessageBuffer, Received
from .requests import Average, Gather, Mix, OpenRound, Reply, RoundLost
from .vector import SentVector, Vector

VERSION = 2  # of a saved round; from 2 on codes are taken off their vector before they are sent


def can_be_saved(opened: OpenRound | None, memory: Memory) -> bool:
    """Whether `saved_round` can describe a round that has departed, with the memory of its algorithm.

    It cannot if a variable of the round is a tensor, or a vector outside the memory.
    """
    if opened is None:
        return True
    kept = {id(x) for x in (*(entry.vector for entry in memory.entries.values()), *memory.scratches.values())}
    generator: Any = opened.generator
    while isinstance(generator, Generator):
        for x in [] if generator.gi_frame is None else generator.gi_frame.f_locals.values():
            if isinstance(x, Tensor) or (isinstance(x, Vector) and id(x) not in kept):
                return False
        generator = generator.gi_yieldfrom
    return isinstance(opened.request, Mix | Average | Gather | None)


def saved_round(opened: OpenRound, memory: Memory) -> dict[str, Any]:
    """Return a round that has departed, and whose reply is there, as tensors and plain values; shares memory.

    [Note: Rounds in a checkpoint] A generator cannot be saved. So a checkpoint has the reply to the first request of
    the round, and the vectors as they are when the reply is there. After a load the round runs again up to its first
    request, on a copy of the model. Then all its vectors get their saved values, and the round goes on with the saved
    reply. So a variable of a round that lives across its first request is a vector or a message, or a number that
    follows from the settings, the numbers of the memory, t and k.

    Args:
        opened: the round.
        memory: the memory of its algorithm.
    """
    v, request = opened.v, opened.request
    return {
        "version": VERSION,
        "t": v.t,
        "k": opened.k,
        "averages": opened.averages,
        "numbers": opened.numbers,
        "inner_rate": v.inner_rate,
        "sent": None if v.sent is None else v.sent.whole.raw,
        "model": v.x.whole.raw if isinstance(v.x, SentVector) else None,
        "scratch": {name: list(x.parts) for name, x in memory.scratches.items()},
        "message": request.message.buffer.raw if isinstance(request, Gather) else None,
        "reply": _saved_reply(opened.reply),
    }


def reopen(opened: OpenRound, saved: Mapping[str, Any], memory: Memory, x: FlatVector) -> None:
    """Give a round that has run up to its first request the values of `saved_round`.

    Args:
        opened: the round, mutated; it began on a copy of x.
        saved: the result of `saved_round`.
        memory: the memory of the algorithm, whose scratch vectors are mutated.
        x: a vector with the layout of the model.

    Raises:
        ValueError: an earlier version of the library saved the round of a method with a compressor.
    """
    request = opened.request
    if isinstance(request, Gather) and request.message.code is not None and saved.get("version", 1) < VERSION:
        raise ValueError(
            f"got a checkpoint with a round of codes under way, of version {saved.get('version', 1)}, expected version "
            f"{VERSION}: its vectors have another meaning now; save it with the earlier library after model.flush()"
        )
    for name, parts in saved["scratch"].items():
        memory.scratch(name).set_(Vector(parts))
    opened.numbers = dict(saved["numbers"])
    if isinstance(request, Gather):
        request.message.buffer.raw.copy_(saved["message"])
    opened.v.sent = None if saved["sent"] is None else Vector.of(_like(x, saved["sent"]))
    opened.v.x = Vector(())  # the round reads the model again when it arrives
    if saved["model"] is not None:
        assert isinstance(request, Mix | Average), "only the model itself is mixed in place"
        correction = _like(x, saved["model"])
        opened.v.x = SentVector(correction.parameters, correction)
        opened.v.x.is_correction = True
        opened.request = replace(request, x=opened.v.x)
    opened.reply = _reply_of(saved["reply"], opened)


def _saved_reply(reply: Reply) -> dict[str, Any]:
    if reply is RoundLost:
        return {"is_lost": True}
    if isinstance(reply, Received):
        return {"messages": [message.buffer.raw for _, message in reply], "numbers": reply.numbers}
    assert reply is None or isinstance(reply, Tensor), "messages of peers answer no request that can be saved"
    return {"numbers": reply}


def _reply_of(saved: Mapping[str, Any], opened: OpenRound) -> Reply:
    if saved.get("is_lost"):
        return RoundLost
    numbers: Tensor | None = saved["numbers"]
    if "messages" not in saved:
        return numbers
    assert isinstance(opened.request, Gather), "messages of all ranks answer a Gather"
    message = opened.request.message
    everyone = [message.reply_in(MessageBuffer(message.buffer.sizes, raw)) for raw in saved["messages"]]
    received = Received([(1.0, each) for each in everyone], begins_with_own=False)
    received.numbers = numbers
    return received


def _like(x: FlatVector, raw: Tensor) -> FlatVector:
    vector = x.like()
    vector.raw.copy_(raw)
    return vector
