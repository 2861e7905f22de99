"""One forward, compiled for all modules that share it; what cannot be compiled whole runs as it is.

first call with one token, first with several    Dynamo, Inductor: seconds
others, in every layer                           checks of what was assumed, compiled code
anything goes wrong                              one warning; from then on the modules' own forward
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch

Backend = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]
_TORCH_S_OWN = frozenset({"aten", "prims", "prim", "higher_order"})


class NotCompilableError(Exception):
    """A forward has something in it that must not be compiled; says what. Never leaves the package."""


def inductor(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compiles a graph with Inductor; graphs of launches are the engine's business.

    Args:
        graph (`torch.fx.GraphModule`):
            What Dynamo has seen.
        inputs (`list[Any]`):
            Examples of its inputs.
    """
    return torch._inductor.compile(graph, inputs, options={"triton.cudagraphs": False})


def kind_of(module: torch.nn.Module) -> Hashable:
    """Returns what modules have in common that are compiled once: classes, their forwards, shapes of weights.

    Args:
        module (`torch.nn.Module`):
            A module.
    """
    classes = tuple((type(inner), type(inner).forward) for inner in module.modules())
    shapes = tuple((parameter.shape, parameter.dtype, parameter.device) for parameter in module.parameters())
    return classes, shapes


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


class CompiledForward:
    """The forward of modules of one kind, to be put into them by `Substitute`.

    Compiled whole or not at all: then nothing in it waits for the device, and it may be captured in a CUDA graph.

    Args:
        name (`str`):
            Of their class.
        backend (`Callable[[GraphModule, list], Callable]`):
            Compiles a graph.
        note (`Callable[[str], None]`):
            Is told, once, why they run as they are.
    """

    def __init__(self, name: str, backend: Backend, note: Callable[[str], None]):
        self.name = name
        self.num_compilations = 0
        self.is_off = False
        self._backend = backend
        self._note = note
        # Dynamo keeps what it compiled, and counts how often, with the code object: each kind has one of its own.
        function = types.FunctionType(_call.__code__.replace(co_name=name), globals(), name)
        self._function: Callable[..., Any] | None = None
        try:
            self._function = torch.compile(function, backend=_backend_of(self), dynamic=True, fullgraph=True)
        except Exception as error:  # Dynamo does not know this Python, for one
            self._turn_off(error)

    def __call__(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs a module's forward.

        Args:
            module (`torch.nn.Module`):
                The module.
            args (`tuple`):
                Positional arguments.
            kwargs (`dict[str, Any]`):
                Keyword arguments.
        """
        if self._function is None:
            return _call(module, *args, **kwargs)
        try:
            return self._function(module, *args, **kwargs)
        except torch.OutOfMemoryError:  # which the engine knows how to deal with
            raise
        except Exception as error:  # Dynamo's, or the module's
            result = _call(module, *args, **kwargs)  # if it is the module's own error, it is raised here
            self._turn_off(error)
            return result

    def compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compiles what Dynamo has seen of the forward.

        Args:
            graph (`torch.fx.GraphModule`):
                What Dynamo has seen.
            inputs (`list[Any]`):
                Examples of its inputs.

        Raises:
            NotCompilableError: If it might wait for the device.
        """
        self.num_compilations += 1
        if any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in inputs):
            check_operators(graph)
        return self._backend(graph, inputs)

    def _turn_off(self, error: Exception) -> None:
        self._function, self.is_off = None, True
        self._note(f"compile_parts leaves {self.name} as it is: {_described(error)}")


def _backend_of(forward: CompiledForward) -> Backend:
    """Dynamo keeps each backend for good, which is not to keep what was compiled."""
    reference = weakref.ref(forward)

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        found = reference()
        assert found is not None, "a forward lives as long as it is called"
        return found.compile(graph, inputs)

    return compile_graph


def check_operators(graph: torch.fx.GraphModule) -> None:
    """Checks that a graph consists of torch's own operators: what is in others is not seen, and might wait.

    Args:
        graph (`torch.fx.GraphModule`):
            What Dynamo has seen.

    Raises:
        NotCompilableError: If there is another one.
    """
    for node in graph.graph.nodes:
        operator = getattr(node.target, "overloadpacket", node.target)
        name = getattr(operator, "_qualified_op_name", "aten::")
        if name.partition("::")[0] not in _TORCH_S_OWN:
            raise NotCompilableError(f"operator {name} is not torch's own and might wait for the device")


def _described(error: Exception) -> str:
    cause = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    text = " ".join(lines[: 1 + lines[0].endswith(":")]) if lines else "no reason given"
    return text if isinstance(cause, NotCompilableError) else f"{type(cause).__name__}: {text}"
