"""llama.cpp through `llama-cpp-python`'s low-level bindings: continuous batching as llama.cpp's own server does it.

Each call of `llama_decode` gets one token of every request that decodes and as many prompt tokens as fit into a batch.
Greedy tokens are the largest logits.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import time
from typing import Any

from measure import Answer, Engine, serve  # isort: skip - the clock of the imports starts here

import llama_cpp
import numpy as np


class LlamaCppEngine(Engine):
    """A GGUF model.

    Args:
        job (`dict[str, Any]`):
            See `Engine`. Options: `model` (the GGUF file), `batch_tokens`, `unified` (one K/V buffer for all).
    """

    def __init__(self, job: dict[str, Any]):
        self.options, self.threads = job["options"], job["threads"]
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(self.options["model"].encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {self.options['model']}")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(self.options["batch_tokens"], 0, 1)
        self.context: Any = None
        self.context_shape = (0, 0)

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[Answer]:
        """See `Engine`.

        Args:
            prompts (`list[list[int]]`):
                Token ids.
            lengths (`list[int]`):
                Tokens to generate for each.
        """
        self._make_context(prompts, lengths)
        begin = time.perf_counter()
        shared = self._share_beginning(prompts)
        done = [shared] * len(prompts)
        tokens: list[list[int]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        while any(len(mine) < length for mine, length in zip(tokens, lengths, strict=True)):
            rows = self._fill_batch(prompts, lengths, done, tokens)
            self._decode()
            for row, index in rows:
                tokens[index].append(self._argmax(row))
            now = time.perf_counter() - begin
            for _, index in rows:
                times[index].append(now)
                if len(tokens[index]) == lengths[index]:
                    llama_cpp.llama_memory_seq_rm(self.memory, index, -1, -1)
        return [Answer(mine, t[0], t[-1]) for mine, t in zip(tokens, times, strict=True)]

    def about(self) -> dict[str, Any]:
        """Returns versions and settings, for the report."""
        return {
            "version": importlib.metadata.version("llama-cpp-python"),
            "system": llama_cpp.llama_print_system_info().decode(),
            **self.options,
        }

    def _make_context(self, prompts: list[list[int]], lengths: list[int]) -> None:
        """A context for so many requests of such lengths, unless the present one is large enough."""
        each = max(len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True))
        total = sum(len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True))
        size = total + 256 if self.options["unified"] else len(prompts) * (-(-each // 256) * 256)
        if (len(prompts), size) == self.context_shape:
            llama_cpp.llama_memory_clear(self.memory, True)
            return
        if self.context is not None:
            llama_cpp.llama_free(self.context)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = size
        params.n_seq_max = len(prompts)
        params.n_batch = self.options["batch_tokens"]
        params.n_threads = params.n_threads_batch = self.threads
        params.kv_unified = self.options["unified"]
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp could not make a context of {size} tokens for {len(prompts)} requests")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.context_shape = (len(prompts), size)

    def _share_beginning(self, prompts: list[list[int]]) -> int:
        """Computes what all prompts begin with once and gives it to each; returns its number of tokens."""
        if len(prompts) == 1:
            return 0
        shortest = min(map(len, prompts))
        shared = next((i for i in range(shortest) if len({p[i] for p in prompts}) > 1), shortest - 1)
        if shared < 64:
            return 0
        for start in range(0, shared, self.options["batch_tokens"]):
            self.batch.n_tokens = 0
            for position in range(start, min(shared, start + self.options["batch_tokens"])):
                self._add(prompts[0][position], position, 0, False)
            self._decode()
        for index in range(1, len(prompts)):
            llama_cpp.llama_memory_seq_cp(self.memory, 0, index, -1, -1)
        return shared

    def _fill_batch(
        self, prompts: list[list[int]], lengths: list[int], done: list[int], tokens: list[list[int]]
    ) -> list[tuple[int, int]]:
        """Fills the batch; returns the rows that have logits and the request of each."""
        self.batch.n_tokens = 0
        rows = []
        for index, prompt in enumerate(prompts):
            if tokens[index] and len(tokens[index]) < lengths[index]:
                rows.append((self.batch.n_tokens, index))
                self._add(tokens[index][-1], len(prompt) + len(tokens[index]) - 1, index, True)
        for index, prompt in enumerate(prompts):
            room = self.options["batch_tokens"] - self.batch.n_tokens
            for position in range(done[index], min(len(prompt), done[index] + room)):
                last = position == len(prompt) - 1
                if last:
                    rows.append((self.batch.n_tokens, index))
                self._add(prompt[position], position, index, last)
                done[index] += 1
        return rows

    def _add(self, token: int, position: int, sequence: int, wants_logits: bool) -> None:
        row = self.batch.n_tokens
        self.batch.token[row] = token
        self.batch.pos[row] = position
        self.batch.n_seq_id[row] = 1
        self.batch.seq_id[row][0] = sequence
        self.batch.logits[row] = wants_logits
        self.batch.n_tokens = row + 1

    def _decode(self) -> None:
        status = llama_cpp.llama_decode(self.context, self.batch)
        if status != 0:
            raise RuntimeError(f"llama_decode failed with status {status}")

    def _argmax(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, row)
        array = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self.vocab_size)).contents
        return int(np.frombuffer(array, dtype=np.float32).argmax())


if __name__ == "__main__":
    serve(LlamaCppEngine)
