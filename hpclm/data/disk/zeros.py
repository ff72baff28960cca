"""Find parts of a file that hold only zeros: what a file system leaves where data were lost in a crash or a copy."""

import numpy as np

PAGE = 4096  # bytes


class ZeroPages:
    """Counts the pages of a file that hold only zero bytes, while the file is passed from start to end."""

    def __init__(self) -> None:
        self.count = 0
        self.first: int | None = None
        """Where the first one begins, in bytes."""
        self._place = 0

    def update(self, piece: memoryview) -> None:
        """Look at the next bytes; all pieces except for the last one must have whole pages."""
        data = np.frombuffer(piece, np.uint8)
        pages = data[: len(data) // PAGE * PAGE].view(np.uint64).reshape(-1, PAGE // 8)
        empty = np.flatnonzero(~pages.any(axis=1))
        if len(empty) and self.first is None:
            self.first = self._place + int(empty[0]) * PAGE
        self.count += len(empty)
        self._place += len(data)

    def told(self) -> str:
        """A warning; "" without such pages."""
        if not self.count:
            return ""
        return (
            f"warning: {self.count * PAGE:,} bytes of the tokens, from byte {self.first:,} on, are pages of zeros, as a crash or an "
            "interrupted copy leaves them; compare the file with its source"
        )
