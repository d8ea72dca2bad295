"""A name of vLLM that ours relies on, and whether the vLLM at hand still has it."""

import importlib
import inspect
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Seam:
    """One name of vLLM, `module:Class.name` or `module:name`.

    use: "override" needs exactly these parameters; "call" needs at least them, and
        defaults for more; "read" is a variable, or an attribute set in `__init__`.
    parameters: their names, separated by blanks.
    bodies: digests of the function, where ours replaces or repeats it; one for each
        form of it that was read (scripts/check_vllm.py prints what it finds).
    """

    target: str
    use: Literal["override", "call", "read"]
    why: str
    remove_when: str
    parameters: str = ""
    bodies: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.target.partition(":")[2]


def parameters_problem(seam: Seam, found: str, num_defaults: int) -> str:
    """What is wrong with a function's parameters, of which the last have defaults."""
    names, needed = found.split(), seam.parameters.split()
    is_more_allowed = seam.use == "call" and num_defaults >= len(names) - len(needed)
    got = names[: len(needed)] if is_more_allowed else names
    return "" if got == needed else f"takes ({found}), expected ({seam.parameters})"


def seam_problem(seam: Seam) -> str:
    """What is wrong with it in the vLLM that is installed; empty: nothing."""
    owner: Any = importlib.import_module(seam.module)
    *classes, name = seam.qualname.split(".")
    for part in classes:
        owner = getattr(owner, part, None)
    if seam.use == "read":
        # An attribute of an instance is a name in the constructor.
        init = inspect.unwrap(owner.__init__) if inspect.isclass(owner) else None
        is_there = hasattr(owner, name) or (init and name in init.__code__.co_names)
        return "" if is_there else "is gone"
    function = inspect.getattr_static(owner, name, None)
    function = getattr(function, "__func__", function)
    if not callable(function):
        return "is gone"
    parameters = inspect.signature(function).parameters
    num_defaults = sum(p.default is not p.empty for p in parameters.values())
    return parameters_problem(seam, " ".join(parameters), num_defaults)
