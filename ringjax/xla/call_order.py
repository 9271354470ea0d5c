"""What orders the calls of one program: each is tied to the one before in its block.

XLA runs calls that share no value in any order, and ranks would disagree. So the last
ringjax value of the MLIR block that is being lowered is remembered here, for the next
call to take as an operand that nobody reads. Also the way from JAX's token to a number
and back, for what cannot take tokens.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from ringjax.xla import tokens


class _CallOrder(threading.local):
    """The last ringjax value of every block of the module being lowered."""

    module: Any = None
    values: dict[Any, tuple[Any, Any]]
    chains = 0
    enabled = True

    def of(self, module: Any) -> dict[Any, tuple[Any, Any]]:
        # Holding the module keeps its blocks alive: no address is reused meanwhile.
        if self.module is not module:
            self.module, self.values, self.chains = module, {}, 0
        return self.values


_order = _CallOrder()


def release_module() -> None:
    """Lets go of the module of this thread."""
    _order.module = None


def chain_number(ctx: Any) -> int:
    """A number for a chain of overlapped calls: another one for each in a module."""
    _order.of(ctx.module_context.module)
    number, _order.chains = _order.chains, _order.chains + 1
    return number


def previous_value(ctx: Any) -> list[tuple[Any, Any]]:
    """The order value that the next call of this block is tied to, if any; its aval."""
    last = _order.of(ctx.module_context.module)
    block = mlir.ir.InsertionPoint.current.block
    return [last[block]] if _order.enabled and block in last else []


def set_previous_value(ctx: Any, value: Any, aval: Any) -> None:
    """The next call of this block is tied to `value`."""
    last = _order.of(ctx.module_context.module)
    last[mlir.ir.InsertionPoint.current.block] = (value, aval)


@contextlib.contextmanager
def unordered() -> Iterator[None]:
    """Lowers without the tie. For the control experiment of the order tests only."""
    _order.enabled = False
    try:
        yield
    finally:
        _order.enabled = True


ORDER = jax.core.ShapedArray((1,), np.dtype(np.uint32))


def order_of_token(ctx: Any) -> tuple[Any, Any]:
    """A number behind JAX's token of the `CollectiveTokenEffect`, and its aval."""
    token = ctx.tokens_in.get(tokens.EFFECT)
    last = [x for x in previous_value(ctx) if x[1] is not tokens.ABSTRACT]
    rule = jax.ffi.ffi_lowering("ringjax_order")
    values, avals = (
        [token, *(v for v, _ in last)],
        [tokens.ABSTRACT, *(a for _, a in last)],
    )
    (order,) = rule(ctx.replace(avals_in=avals, avals_out=[ORDER]), *values)
    return order, ORDER


def token_of_order(ctx: Any, order: Any, aval: Any) -> None:
    """JAX's token is behind the number `order`, and so is the next call."""
    rule = jax.ffi.ffi_lowering("ringjax_order")
    local = ctx.replace(avals_in=[aval], avals_out=[tokens.ABSTRACT])
    (token,) = rule(local, order)
    set_token(ctx, token)
    set_previous_value(ctx, order, aval)


def set_token(ctx: Any, token: Any) -> None:
    """JAX's token of the `CollectiveTokenEffect` from here on; those of others stay."""
    after = mlir.TokenSet({tokens.EFFECT: token})
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(after))
