"""Orders the calls of a program, by making each call depend on the previous call.

XLA runs calls that share no value in any order, so ranks would make their calls in
different orders. Therefore each call takes the last result of the previous call in its
MLIR block, the *order value*, as an additional operand, which the handler ignores. This
module remembers the order value of each block while an MLIR module is lowered. The
module also converts JAX's token to an array and back, for programs without tokens.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from ringjax.xla import tokens
from ringjax.xla.jax_types import Context, IrValue

OrderValue = tuple[IrValue, jax.core.AbstractValue]


class _CallOrder(threading.local):
    """The order value of each block in the MLIR module that this thread lowers."""

    module: mlir.ir.Module | None = None
    values: dict[mlir.ir.Block, OrderValue]
    chains = 0
    enabled = True

    def of(self, module: mlir.ir.Module) -> dict[mlir.ir.Block, OrderValue]:
        # The reference to the module keeps its blocks alive. Without it, a later block
        # could have the address, and so the dict entry, of an earlier block.
        if self.module is not module:
            self.module, self.values, self.chains = module, {}, 0
        return self.values


_order = _CallOrder()


def release_module() -> None:
    _order.module = None


def chain_number(ctx: Context) -> int:
    """Returns an id for a chain of overlapped calls, unique within the MLIR module."""
    _order.of(ctx.module_context.module)
    number, _order.chains = _order.chains, _order.chains + 1
    return number


def previous_value(ctx: Context) -> list[OrderValue]:
    """Returns a list with the order value of this block's last call, or []."""
    values = _order.of(ctx.module_context.module)
    block = mlir.ir.InsertionPoint.current.block
    return [values[block]] if _order.enabled and block in values else []


def set_previous_value(
    ctx: Context, value: IrValue, aval: jax.core.AbstractValue
) -> None:
    """Makes the next call of this block depend on `value`."""
    values = _order.of(ctx.module_context.module)
    values[mlir.ir.InsertionPoint.current.block] = (value, aval)


@contextlib.contextmanager
def unordered() -> Iterator[None]:
    """Lowers calls without order, so that a test can show that the order matters."""
    _order.enabled = False
    try:
        yield
    finally:
        _order.enabled = True


ORDER = jax.core.ShapedArray((1,), np.dtype(np.uint32))


def order_of_token(ctx: Context) -> OrderValue:
    """Emits the conversion of JAX's token into an order value."""
    token = ctx.tokens_in.get(tokens.EFFECT)
    previous = [x for x in previous_value(ctx) if x[1] is not tokens.ABSTRACT]
    return _convert(ctx, [(token, tokens.ABSTRACT), *previous], ORDER), ORDER


def token_of_order(ctx: Context, order: IrValue, aval: jax.core.AbstractValue) -> None:
    """Makes JAX's token and the next call depend on the order value `order`."""
    set_token(ctx, _convert(ctx, [(order, aval)], tokens.ABSTRACT))
    set_previous_value(ctx, order, aval)


def _convert(
    ctx: Context, values: Sequence[OrderValue], aval: jax.core.AbstractValue
) -> IrValue:
    rule = jax.ffi.ffi_lowering("ringjax_order")
    local = ctx.replace(avals_in=[a for _, a in values], avals_out=[aval])
    results: Any = rule(local, *(value for value, _ in values))
    result: IrValue = results[0]
    return result


def set_token(ctx: Context, token: IrValue) -> None:
    """Sets JAX's token of `CollectiveTokenEffect`, and keeps other effects' tokens."""
    after = mlir.TokenSet({tokens.EFFECT: token})
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(after))
