"""The error messages of reducer.py. Each message says what the user can do."""

from __future__ import annotations

TOO_MANY_BACKWARDS = (
    "Gradients were computed more than backward_passes_per_step times before call to "
    "step(): {name!r}, more than {passes}. Increase backward_passes_per_step to "
    "accumulate gradients locally. If the backward pass before failed, or was that of "
    "another network's loss, call optimizer.zero_grad() or, on every rank, "
    "optimizer.step() after it; or keep that loss out by requires_grad_(False) on "
    "these parameters. A parameter that several activation checkpoints use "
    "needs checkpoint(..., use_reentrant=False)."
)
GRADIENT_CHANGED = (
    "the gradient of {name!r} was changed between backward() and step() before it was "
    "reduced, since not all ranks had sent theirs: their losses use other parameters, "
    "some of its group (groups=) have no gradient, or zero_grad(set_to_none=False) "
    "left a gradient there. Call optimizer.synchronize() before the change, and "
    "optimizer.step() within `with optimizer.skip_synchronize():`."
)
GRADIENT_HAS_GRAPH = (
    "backward(create_graph=True) leaves a gradient of {name!r} that is part of a "
    "graph, and a reduced gradient has none. Take the inner derivative by "
    "torch.autograd.grad(..., create_graph=True), and call backward() on the sum."
)
DUPLICATE_NAME = (
    "two optimizers have a parameter named {name!r}, and both have gradients on their "
    "way. Give them different names: DistributedOptimizer(optimizer, "
    "[(f'decoder.{{n}}', p) for n, p in decoder.named_parameters()])"
)
STEPS_DIFFER = (
    "some ranks have made a step since the gradients before, and others have left it "
    "out (synchronize() without step(), or an error of one rank alone), so their "
    "parameters differ. Let all ranks decide alike, or send the parameters anew: "
    "broadcast_parameters(...) and broadcast_optimizer_state(...)"
)
