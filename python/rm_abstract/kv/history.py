"""What a cache was fed, so that it can be fed again when the device that held it is lost."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Fed:
    """Tokens given to the model in one piece: the argument that held them, and their positions."""

    name: str
    tokens: torch.Tensor
    positions: torch.Tensor | None


@dataclass
class History:
    """The inputs that made a cache's content. ``whole`` is False when something is missing, or came
    of the model in another state: ``changes`` is how often it was changed."""

    pieces: list[Fed] = field(default_factory=list)
    mask: torch.Tensor | None = None
    length: int = 0
    whole: bool = True
    changes: int = 0

    def record(
        self,
        start: int,
        name: str,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        mask: torch.Tensor | None,
        changes: int,
    ) -> None:
        """Tokens at the positions from ``start`` on; what was known behind them is forgotten."""
        self.truncate(start)
        if self.pieces and changes != self.changes:
            self.whole = False
        self.changes = changes
        if start > self.length or (mask is not None and mask.dim() != 2):
            self.whole = False  # the original ran meanwhile, or a mask that is not replayed
        if self.whole and start and not self._agrees(mask, start):
            self.whole = False  # another mask for the same past
        if not self.whole:
            return
        self.pieces.append(Fed(name, tokens, positions))
        self.mask = mask
        self.length = start + tokens.shape[1]

    def _agrees(self, mask: torch.Tensor | None, start: int) -> bool:
        if mask is None or self.mask is None:
            return mask is self.mask
        return bool(torch.equal(mask[:, :start], self.mask[:, :start]))

    def truncate(self, length: int) -> None:
        """Forgets what lies behind ``length`` positions."""
        while self.length > length:
            last = self.pieces.pop()
            self.length -= last.tokens.shape[1]
            if self.length < length:
                keep = length - self.length
                positions = None if last.positions is None else last.positions[:, :keep]
                self.pieces.append(Fed(last.name, last.tokens[:, :keep], positions))
                self.length = length

    def select(self, rows: torch.Tensor) -> None:
        """Rows ``rows`` of the batch, in this order."""
        self.pieces = self.merged()  # pieces of its own, no copy shares them
        for piece in self.pieces:
            piece.tokens = piece.tokens.index_select(0, rows)
            positions = piece.positions
            if positions is not None and positions.shape[0] > 1:  # one row stands for all
                piece.positions = positions.index_select(0, rows)
        if self.mask is not None:
            self.mask = self.mask.index_select(0, rows)

    def copied(self) -> History:
        """A history that goes on by itself."""
        return History(list(self.pieces), self.mask, self.length, self.whole, self.changes)

    def merged(self) -> list[Fed]:
        """The pieces, as few as there can be."""
        out: list[list[Fed]] = []
        for piece in self.pieces:
            same = out and out[-1][0].name == piece.name
            if same and (out[-1][0].positions is None) == (piece.positions is None):
                out[-1].append(piece)
            else:
                out.append([piece])
        return [_joined(group) for group in out]


def _joined(group: list[Fed]) -> Fed:
    tokens = torch.cat([piece.tokens for piece in group], dim=1)
    positions = [piece.positions for piece in group if piece.positions is not None]
    return Fed(group[0].name, tokens, torch.cat(positions, dim=1) if positions else None)
