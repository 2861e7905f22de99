"""Smaller steps after one that ran out of memory, and back to the full size as steps succeed. No torch."""

from __future__ import annotations

PATIENCE = 16  # steps that must succeed before they may be twice as large again


class Throttle:
    """How large a step may be now.

        num_tokens   2048  2048 | 900 700 650 ...  1300 ... | 2048
                     out of memory ^    after 16 steps ^

    Args:
        max_num_seqs (`int`):
            Requests of a step at most.
        max_num_tokens (`int`):
            Tokens of a step at most.
    """

    def __init__(self, max_num_seqs: int, max_num_tokens: int):
        self.num_seqs = max_num_seqs
        self.num_tokens = max_num_tokens
        self._most = (max_num_seqs, max_num_tokens)
        self._num_calm = 0  # steps that have succeeded since the size changed
        self._num_vain = 0  # steps that have failed since, though they could not get smaller

    def shrink(self, num_seqs: int, num_tokens: int) -> bool:
        """Allows only half of what was too much.

        Args:
            num_seqs (`int`):
                Requests of the step that ran out of memory.
            num_tokens (`int`):
                Tokens of it.

        Returns:
            `bool`: Whether to try again: smaller, or once more at the smallest size, since others use the memory too.
        """
        before = self.num_seqs, self.num_tokens
        self.num_seqs = min(self.num_seqs, max(1, num_seqs // 2))
        self.num_tokens = min(self.num_tokens, max(1, num_tokens // 2))
        self._num_calm = 0
        self._num_vain = 0 if (self.num_seqs, self.num_tokens) != before else self._num_vain + 1
        return self._num_vain <= 1

    def relax(self) -> None:
        """A step has succeeded."""
        self._num_vain = 0
        if (self.num_seqs, self.num_tokens) == self._most:
            return
        self._num_calm += 1
        if self._num_calm == PATIENCE:
            self._num_calm = 0
            self.num_seqs = min(2 * self.num_seqs, self._most[0])
            self.num_tokens = min(2 * self.num_tokens, self._most[1])
