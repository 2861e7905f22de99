"""What a format of quantized weights has to say about itself."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ..errors import CheckpointError, NotSupportedError
from ..registry import Registry


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A tensor as the header of a checkpoint file describes it.

    Args:
        shape (`tuple[int, ...]`):
            Its shape.
        dtype (`torch.dtype`):
            Its dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """What the tensors of a quantized linear mean: `weight[o, i] = (codes[o, i] - zero[o, g]) * scale[o, g]`.

    Args:
        codes (`torch.Tensor`):
            `[out_features, in_features]` uint8, int8 or float8.
        scale (`torch.Tensor`):
            `[out_features or 1, groups]`.
        zero (`torch.Tensor`, *optional*):
            The same, in units of the codes; none: 0.
        group (`torch.Tensor`, *optional*):
            `[in_features]` int64: g, the group of each input. None: neighbours in `group_size`s.
        group_size (`int`, *optional*):
            Inputs of a group where these are neighbours; the last group may be smaller. None: one group.
        bits (`int`, defaults to 8):
            Those of the codes that are in use.
        rounds_inputs (`bool`, defaults to `False`):
            Whether inputs are to be rounded to int8, token by token.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    group: torch.Tensor | None = None
    group_size: int | None = None
    bits: int = 8
    rounds_inputs: bool = False

    def groups(self) -> torch.Tensor:
        """Returns the group of each input, `[in_features]` int64."""
        if self.group is not None:
            return self.group.long()
        in_features = self.codes.shape[1]
        return groups_in_order(in_features, self.group_size or -1, self.codes.device)

    def dequantize(self) -> torch.Tensor:
        """Returns the weight, `[out_features, in_features]` float32."""
        weight, scale = self.codes.float(), self.scale.float()
        if scale.shape[1] == 1:
            if self.zero is not None:
                weight.sub_(self.zero.float())
            return weight.mul_(scale)
        groups = self.groups()
        if self.zero is not None:
            weight.sub_(self.zero.float()[:, groups])
        return weight.mul_(scale[:, groups])


class LinearFormat(abc.ABC):
    """How one linear of `[out_features, in_features]` lies in a checkpoint. One object serves many linears.

    Tensors are named by what follows the module's name and a dot (`qweight`); a bias is not among them.
    """

    required: ClassVar[Sequence[str]] = ()
    optional: ClassVar[Sequence[str]] = ()
    codes_name: ClassVar[str]  # the tensor that holds the codes, nearly all of the bytes

    @abc.abstractmethod
    def check(self, module: str, tensors: Mapping[str, TensorInfo], out_features: int, in_features: int) -> None:
        """Compares what a file says of a linear with what the model and its configuration say.

        Args:
            module (`str`):
                The linear's name, for messages.
            tensors (`Mapping[str, TensorInfo]`):
                Its tensors; the required ones are there.
            out_features (`int`):
                By the model.
            in_features (`int`):
                By the model.

        Raises:
            CheckpointError: If they contradict each other; names the tensor, what was expected and what was found.
        """

    def check_values(self, module: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Looks at what has been read.

        Args:
            module (`str`):
                The linear's name, for messages.
            tensors (`Mapping[str, torch.Tensor]`):
                Its tensors.

        Raises:
            CheckpointError: If a scale is NaN or infinite, or an index points nowhere.
        """
        for name, tensor in tensors.items():
            if "scale" in name and tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
                raise CheckpointError(
                    f"`{module}.{name}` holds NaN or infinite scales: the checkpoint is damaged; fetch or make it anew."
                )

    @abc.abstractmethod
    def read(self, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int) -> QuantizedWeight:
        """Takes the tensors apart.

        Args:
            tensors (`Mapping[str, torch.Tensor]`):
                Those of a linear, as in the checkpoint.
            out_features (`int`):
                Rows.
            in_features (`int`):
                Columns.
        """

    @abc.abstractmethod
    def write_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """Makes the tensor `codes_name` again.

        Args:
            codes (`torch.Tensor`):
                As `read` returns them.

        Returns:
            `torch.Tensor`: The bytes that `read` was given.
        """

    def expect(self, module: str, name: str, found: TensorInfo, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
        """Holds a tensor against the shape and the dtypes that it may have.

        Args:
            module (`str`):
                The linear's name, for messages.
            name (`str`):
                The tensor's.
            found (`TensorInfo`):
                What the file says.
            shape (`tuple[int, ...]`):
                The only one that fits.
            dtypes (`torch.dtype`):
                Those that fit.

        Raises:
            CheckpointError: If it has another one.
        """
        if found.shape != shape:
            raise CheckpointError(
                f"`{module}.{name}` has shape {list(found.shape)} where {self} and the model's configuration ask for "
                f"{list(shape)}: the checkpoint is damaged, or its config.json belongs to another one."
            )
        if found.dtype not in dtypes:
            raise CheckpointError(
                f"`{module}.{name}` is {found.dtype} where {self} stores {' or '.join(map(str, dtypes))}: the "
                "checkpoint is damaged, or its config.json belongs to another one."
            )


class CheckpointFormat(abc.ABC):
    """The formats of all linears of a checkpoint, made of the `quantization_config` in its `config.json`.

    Args:
        config (`Mapping[str, Any]`):
            The `quantization_config`.

    Raises:
        CheckpointError: If a field is missing or has an impossible value.
        NotSupportedError: If it asks for a variant that is not built.
    """

    @abc.abstractmethod
    def __init__(self, config: Mapping[str, Any]): ...

    @abc.abstractmethod
    def linear_format(self, module: str) -> LinearFormat | None:
        """Returns how a linear is stored, or `None` if the configuration leaves it dense.

        Args:
            module (`str`):
                The linear's name in the model.
        """


FORMATS: Registry[type[CheckpointFormat]] = Registry("quantization method")


def field(config: Mapping[str, Any], method: str, name: str, allowed: Sequence[Any], default: Any = None) -> Any:
    """Reads a field of a `quantization_config` that has few values.

    Args:
        config (`Mapping[str, Any]`):
            The `quantization_config`.
        method (`str`):
            Its `quant_method`, for messages.
        name (`str`):
            The field.
        allowed (`Sequence[Any]`):
            The values that are built.
        default (`Any`, *optional*):
            Where the field is missing; none: it must be there.

    Raises:
        CheckpointError: If it is missing.
        NotSupportedError: If it has another value.
    """
    value = config.get(name, default)
    if value is None:
        raise CheckpointError(
            f"The `quantization_config` of method {method!r} has no `{name}`; it must be one of {list(allowed)}."
        )
    if value not in allowed:
        raise NotSupportedError(
            f"`{name}` {value!r} in the `quantization_config` of method {method!r} is not built; built are "
            f"{list(allowed)}."
        )
    return value


def group_size(config: Mapping[str, Any], method: str, default: int | None = None) -> int:
    """Reads `group_size`: a whole number, or -1 for one group along the whole row.

    Args:
        config (`Mapping[str, Any]`):
            The `quantization_config`.
        method (`str`):
            Its `quant_method`, for messages.
        default (`int`, *optional*):
            Where the field is missing.

    Raises:
        CheckpointError: If it is no such number.
    """
    size = config.get("group_size", default)
    if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
        raise CheckpointError(
            f"`group_size` in the `quantization_config` of method {method!r} must be a whole number from 1, or -1 for "
            f"one group a row, got {size!r}."
        )
    return size


def num_groups(in_features: int, size: int) -> int:
    """Returns the groups of a row.

    Args:
        in_features (`int`):
            The length of a row.
        size (`int`):
            Of a group; -1 for the whole row.
    """
    return 1 if size == -1 else -(-in_features // size)


def groups_in_order(in_features: int, size: int, device: torch.device) -> torch.Tensor:
    """Returns the group of each input where groups are neighbours, `[in_features]` int64.

    Args:
        in_features (`int`):
            The length of a row.
        size (`int`):
            Of a group; -1 for the whole row.
        device (`torch.device`):
            Where to.
    """
    return torch.arange(in_features, device=device) // (in_features if size == -1 else size)
