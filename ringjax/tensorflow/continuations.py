"""How an asynchronous kernel of TensorFlow's says, later, that it has ended.

TF_NewAsyncKernelBuilder hands a kernel the address of a `std::function` that its
caller destroys when the kernel returns (TensorFlow 2.21). So it is moved away first, as
its own move constructor does: four words are copied, and the one by which it knows that
it holds something is cleared. They are, in libstdc++: two of what it holds, the address
of what copies and destroys that, and the address of what calls it.
"""

from __future__ import annotations

import ctypes
from typing import Any

Address = ctypes.c_void_p
_Words = Address * 4
_MANAGES, _CALLS = 2, 3
_DESTROY = 3  # what the manager is asked to do
_Manager = ctypes.CFUNCTYPE(ctypes.c_bool, Address, Address, ctypes.c_int)
# The answer to dladdr has four words, too.
_dladdr: Any = ctypes.CDLL(None).dladdr
_dladdr.argtypes = Address, _Words


class Continuation:
    """What is called once, when the kernel has ended.

    Args:
        address: TensorFlow's TF_AsyncOpKernelDoneCallback.
        run: TF_RunAsyncOpKernelDoneCallback.

    Attributes:
        late: it may be called after the kernel has returned. False: the words are not
            those that are known here, so it has to be called before.
    """

    def __init__(self, address: int, run: Any) -> None:
        self._run = run
        theirs = _Words.from_address(address)
        self.late = all(_dladdr(theirs[i], _Words()) for i in (_MANAGES, _CALLS))
        if self.late:
            self._words = _Words(*theirs)
            theirs[_MANAGES] = None
        else:
            self._words = theirs

    def __call__(self) -> None:
        """The graph goes on."""
        self._run(ctypes.addressof(self._words))
        if self.late:
            held = ctypes.addressof(self._words)
            destroy = _Manager(self._words[_MANAGES] or 0)
            destroy(held, held, _DESTROY)
