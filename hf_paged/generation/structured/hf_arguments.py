"""`structured_outputs` as an argument of `generate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig, LogitsProcessorList

from ...errors import InvalidRequestError
from ..hf_generate import GenerateCall
from ..model_state import eos_token_ids, with_end_of
from .compiler import compile_grammar
from .logits_processor import GrammarLogitsProcessor
from .params import StructuredOutputsParams
from .tokenizers import TokenizerSpec


@dataclasses.dataclass(frozen=True)
class StructuredArguments:
    """What a call of `generate` says about the form of its answers.

    Args:
        params (`StructuredOutputsParams`):
            The form.
        tokenizer (`PreTrainedTokenizerFast`):
            The model's tokenizer.
    """

    params: StructuredOutputsParams
    tokenizer: Any

    @classmethod
    def take(cls, kwargs: dict[str, Any]) -> StructuredArguments | None:
        """Takes them out of the keyword arguments, if there are any.

        Args:
            kwargs (`dict[str, Any]`):
                Of `generate`; `structured_outputs` is removed.

        Raises:
            InvalidRequestError: If they are malformed, or there is no tokenizer.
        """
        given = kwargs.pop("structured_outputs", None)
        if given is None:
            return None
        return cls(StructuredOutputsParams.of(given), checked_tokenizer(kwargs.get("tokenizer")))

    def for_engine(self, call: GenerateCall) -> GenerateCall:
        """Returns a call whose rows have this form.

        Args:
            call (`GenerateCall`):
                What the engine will run.
        """
        return dataclasses.replace(call, structured_outputs=self.params, tokenizer=self.tokenizer)

    def for_loop(
        self, model: Any, config: GenerationConfig | None, kwargs: Mapping[str, Any], given: Any
    ) -> LogitsProcessorList:
        """Returns the logits processors of a call that Transformers' own loop runs.

        Args:
            model (`PreTrainedModel`):
                The model.
            config (`GenerationConfig`, *optional*):
                As given.
            kwargs (`Mapping[str, Any]`):
                As given.
            given (`Sequence[Callable]`, *optional*):
                The caller's own processors.

        Raises:
            InvalidRequestError: If the grammar is malformed.
            NotSupportedError: If nothing ends an answer.
        """
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        spec = TokenizerSpec(self.tokenizer, vocab_size, with_end_of(self.tokenizer, eos_token_ids(model)))
        grammar = compile_grammar(self.params.source, spec).result()
        ends = next(
            (end for end in (kwargs.get("eos_token_id"), getattr(config, "eos_token_id", None)) if end is not None),
            eos_token_ids(model),
        )
        ends = [ends] if isinstance(ends, int) else [int(end) for end in ends]
        return LogitsProcessorList([*(given or ()), GrammarLogitsProcessor(grammar, ends)])


def checked_tokenizer(tokenizer: Any) -> Any:
    """Returns the tokenizer that was given.

    Args:
        tokenizer (`PreTrainedTokenizerFast`, *optional*):
            As given.

    Raises:
        InvalidRequestError: If none was.
    """
    if tokenizer is None:
        raise InvalidRequestError(
            "`structured_outputs` needs the model's tokenizer, as `stop_strings` does: pass `tokenizer=` too."
        )
    return tokenizer
