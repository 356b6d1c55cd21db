"""Licence texts to test with: MIT, and two that others made of it with one more sentence. Their hashes are those of the originals."""

from __future__ import annotations

MIT = """MIT License

Copyright (c) {owner}

Permission is hereby granted, free of charge, to any person obtaining a copy
of this software and associated documentation files (the "Software"), to deal
in the Software without restriction, including without limitation the rights
to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
SOFTWARE.
"""
_MORE = (
    "\nOur only modification {part}is that, if the Software (or any derivative works thereof) is used for any of your"
    " commercial products or services that have more than 100 million monthly active users, or more than {money} (or"
    " equivalent in other currencies) in {revenue} revenue, you shall prominently display “{name}” on the user interface"
    " of such product or service.\n"
)
_KIMI = _MORE.format(part="part ", money="20 million US dollars", revenue="monthly", name="Kimi K2.5")
KIMI = MIT.format(owner="2026 Moonshot AI").replace("MIT", "Modified MIT", 1) + _KIMI
_MINIMAX = _MORE.format(part="", money="30 million US dollars", revenue="annual recurring", name="MiniMax M2")
MINIMAX = (
    MIT.format(owner="").replace("Copyright (c) ", "Copyright 2025 MiniMax AI.") + _MINIMAX
)  # headed “MIT License”
