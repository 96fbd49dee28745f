"""Options of version 0.1 that set arguments of an algorithm, as the text that --algorithm takes in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gossip_modules.methods import read_algorithm

_PUBLISHED: Mapping[str, float] = {
    "SignNorm()": 0.45,
    "TopK(0.01)": 0.0375,
    "TopK(0.1)": 0.1,
    "RandomK(0.01)": 0.01,
    "QSGD(4)": 0.34,
    "QSGD(8)": 0.34,
    "Cast(bfloat16)": 1.0,
    "Cast(float16)": 1.0,
}
"""The step sizes of CHOCO-SGD that version 0.1 took where none was given, by the text of the compressor; that of
TopK(0.1) is the default of MATCHA's script."""
_DRIFT_CODES: Mapping[str, str] = {"4": "QSGD(4, 32, unbiased=True)", "8": "QSGD(8, 512, unbiased=True)"}
_CODES: Mapping[str, str] = {
    "sign": "SignNorm()",
    "topk": "TopK({ratio})",
    "randomk": "RandomK({ratio})",
    "qsgd": "QSGD({bits})",
    "bfloat16": "Cast(bfloat16)",
    "float16": "Cast(float16)",
}
_INTERPOLATIONS = {"clock": "ClockInterpolation()", "loss": "LossInterpolation()"}

Old = Mapping[str, str]
"""Old options by name, as they were typed."""


def _numbers(**names: str) -> Callable[[Old], dict[str, str]]:
    """Arguments with the same values, by their names now."""
    return lambda old: {new: old[name] for new, name in names.items() if name in old}


def _coded(old: Old, default: float) -> dict[str, str]:
    name = old.get("compressor", "sign")
    if name not in _CODES:
        raise ValueError(f"got compressor={name}, expected one of {', '.join(_CODES)}; choose one of them")
    code = _CODES[name].format(ratio=old.get("compression_ratio", "0.01"), bits=old.get("compression_bits", "8"))
    published = _PUBLISHED if default else {"SignNorm()": 0.01}
    step_size = old.get("step_size", str(published.get(code, "")))
    if not step_size:
        raise ValueError(f"got {code} and no step_size, expected one; found on a few steps")
    return {"": code, "step_size": step_size}


def _outer(old: Old) -> dict[str, str]:
    arguments = _numbers(sync_every="sync_period", lr="outer_lr", momentum="outer_momentum")(old)
    arguments.setdefault("sync_every", "10")
    if old.get("anchor_device") == "cpu":
        arguments["anchor_device"] = "'cpu'"
    if (bits := old.get("outer_bits", "0")) != "0":
        if bits not in _DRIFT_CODES:
            raise ValueError(f"got outer_bits={bits}, expected 4 or 8, or 0 for drifts as they are; choose one")
        arguments["compressor"] = _DRIFT_CODES[bits]
    return arguments


def _with_outer(**names: str) -> Callable[[Old], dict[str, str]]:
    return lambda old: {**_outer(old), **_numbers(**names)(old)}


def _sparse_loco(old: Old) -> dict[str, str]:
    k = max(1, round(4096 * float(old.get("compression_ratio", "0.01"))))
    return {**_with_outer(decay="error_decay")(old), "compressor": f"ChunkTopK({k}, values=TwoBit())"}


def _moniqua(old: Old) -> dict[str, str]:
    return {"theta": "1.0", **_numbers(theta="theta", bits="compression_bits", step_size="step_size")(old)}


def _slowmo(old: Old) -> dict[str, str]:
    return {"inner_lr": "'optimizer'", **_with_outer(gossip_every="outer_gossip_every")(old)}


def _wagma(old: Old) -> dict[str, str]:
    arguments = _numbers(group_size="group_size", sync_period="sync_period", wait_avoiding="wait_avoiding")(old)
    return {name: value for name, value in arguments.items() if (name, value) != ("group_size", "0")}


def _dpwa(old: Old) -> dict[str, str]:
    arguments = _numbers(divergence_threshold="divergence_threshold", fetch_probability="fetch_probability")(old)
    kind = old.get("interpolation", "constant")
    if kind in _INTERPOLATIONS:
        arguments["interpolation"] = _INTERPOLATIONS[kind]
    elif "interpolation_value" in old:
        arguments["interpolation"] = f"ConstantInterpolation({old['interpolation_value']})"
    return arguments


def _matcha(old: Old) -> dict[str, str]:
    return {"plan": repr(old["plan"])} if old.get("plan") else _numbers(budget="budget")(old)


_POWER = _numbers(
    rank="power_rank",
    num_iterations="power_iterations",
    warm_start="warm_start",
    compress_vectors="compress_vectors",
    step_size="step_size",
)
CALLS: Mapping[str, tuple[str, Callable[[Old], dict[str, str]]]] = {
    "choco": ("Choco", lambda old: _coded(old, 0.45)),
    "deepsqueeze": ("DeepSqueeze", lambda old: _coded(old, 0.0)),
    "moniqua": ("Moniqua", _moniqua),
    "powergossip": ("PowerGossip", _POWER),
    "matcha": ("MATCHA", _matcha),
    "wagma": ("WAGMA", _wagma),
    "dpwa": ("Dpwa", _dpwa),
    "localsgd": ("LocalSGD", lambda old: {"sync_every": old.get("sync_period", "10")}),
    "diloco": ("DiLoCo", _outer),
    "streamingdiloco": (
        "StreamingDiLoCo",
        _with_outer(fragments="outer_fragments", delay="outer_delay", own_weight="outer_own_weight"),
    ),
    "eagerdiloco": ("EagerDiLoCo", _outer),
    "sparseloco": ("SparseLoCo", _sparse_loco),
    "slowmo": ("SlowMo", _slowmo),
    "noloco": ("NoLoCo", _with_outer(pull="outer_pull")),
    "gasloc": ("GASLoC", _with_outer(step_size="step_size")),
    "sparta": ("Sparta", lambda old: {"": old.get("compression_ratio", "0.01")}),
}
"""The recipes that had such options: the name to call, and its arguments; "" is the one without a name."""
SETTINGS: Mapping[str, str] = {
    "compressor": "sign",
    "compression_ratio": "0.01",
    "compression_bits": "8",
    "step_size": "0.0",
    "budget": "0.5",
    "plan": "",
    "theta": "1.0",
    "power_rank": "1",
    "power_iterations": "1",
    "warm_start": "True",
    "compress_vectors": "False",
    "group_size": "0",
    "wait_avoiding": "True",
    "sync_period": "10",
    "outer_lr": "0.0",
    "outer_momentum": "-1.0",
    "outer_fragments": "4",
    "outer_delay": "1",
    "outer_bits": "0",
    "outer_own_weight": "-1.0",
    "outer_gossip_every": "0",
    "outer_pull": "0.0",
    "anchor_device": "model",
    "error_decay": "0.95",
    "interpolation": "constant",
    "interpolation_value": "0.5",
    "divergence_threshold": "0.0",
    "fetch_probability": "1.0",
}
"""The options, with their defaults."""


def algorithm_text(recipe: str, old: Mapping[str, Any]) -> str:
    """The text for --algorithm that old options beside a recipe mean; "": what the recipe means by itself.

    Args:
        recipe: the name of a method.
        old: values of options of SETTINGS by name; other names, and options without effect, are left out.

    Raises:
        ValueError: a value that the option did not take.

    >>> algorithm_text("diloco", {"sync_period": 50})
    'DiLoCo(sync_every=50)'
    """
    given = {name: str(old[name]) for name in SETTINGS if name in old and _differs(str(old[name]), SETTINGS[name])}
    if not given or recipe not in CALLS:
        return ""
    name, arguments = CALLS[recipe]
    made = arguments(given)
    return f"{name}({', '.join(value if not key else f'{key}={value}' for key, value in made.items())})"


def texts_of_old_options(old: Mapping[str, Any]) -> dict[str, str]:
    """The algorithm and the schedule of a checkpoint of version 0.1, which has the old options of its run."""
    text, target = algorithm_text(str(old.get("recipe", "")), old), str(old.get("consensus_target", "0"))
    schedule = f"ConsensusControl(target={target})" if _differs(target, "0") else ""  # which no run has any more
    return {"algorithm": read_algorithm(text).text if text else "", "schedule": schedule}


def _differs(value: str, default: str) -> bool:
    try:
        return float(value) != float(default)
    except ValueError:
        return value != default
