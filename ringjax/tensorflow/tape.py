"""DistributedGradientTape: a `tf.GradientTape` whose gradients are those of all ranks.

How gradients are reduced is gradients.py.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ringjax.horovod.functions import local_variables
from ringjax.ops import Average
from ringjax.tensorflow.autograph import do_not_convert
from ringjax.tensorflow.compression import Compression
from ringjax.tensorflow.gradients import GradientReducer, GradientSettings
from ringjax.world.process_set import ProcessSet, global_process_set

_NAME = "DistributedGradientTape"
# Variables and what is the gradient of each.
Pairs = list[tuple[Any, Any]]


class _DistributedGradientTape(tf.GradientTape):
    """What is added to the class of a tape.

    Attributes:
        process_set: the ranks that take part.
        scale_local_gradients: whether local gradients are divided by their number.
    """

    _reduction: GradientReducer
    _recorder: tf.GradientTape  # what this one was made from

    @property
    def process_set(self) -> ProcessSet:
        return self._reduction.settings.process_set

    @property
    def scale_local_gradients(self) -> bool:
        return self._reduction.settings.scale_local_gradients

    def _pop_tape(self) -> None:
        super()._pop_tape()
        # Made while that one records, its `with` block is still to end.
        self._recorder._recording = False

    def register_local_source(self, source: Any) -> None:
        """The gradients of this source are this rank's own, and are not reduced."""
        self._reduction.register_local(source)

    @do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """The gradients of `target`, reduced over all ranks.

        Args:
            target: as for `tf.GradientTape.gradient`, as are `sources`,
                `output_gradients` and `unconnected_gradients`.
            use_generic_names: Horovod's; names never depend on the sources' here.

        Returns:
            The same structure as `sources`.
        """
        if isinstance(use_generic_names, tf.UnconnectedGradients | str):
            unconnected_gradients = use_generic_names  # TensorFlow's fourth argument
        found = super().gradient(
            target, sources, output_gradients, unconnected_gradients
        )
        gradients = tf.nest.flatten(found)
        reduced = self._reduction(gradients, tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(found, reduced)

    @do_not_convert
    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[Pairs, Pairs]:
        """The gradients of local sources, and of all others, which are reduced.

        Args: as `gradient`.

        Returns:
            Two lists of pairs of a source and its gradient.
        """
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(
            zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True)
        )
        is_local = self._reduction.is_local
        return (
            [pair for pair in pairs if is_local(pair[0])],
            [pair for pair in pairs if not is_local(pair[0])],
        )


@do_not_convert
def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes a tape like `gradtape` whose `gradient` is reduced over all ranks.

    All ranks call `gradient` of the same sources, in the same order of calls; in
    eager mode and inside of `tf.function`. Gradients travel in buckets of
    RINGJAX_BUCKET_BYTES, each as soon as its gradients are there.

    Args:
        gradtape: a tape, before, during or after its recording.
        device_dense: where dense gradients are reduced.
        device_sparse: where `tf.IndexedSlices` are.
        compression: what travels, for instance `Compression.fp16`.
        sparse_as_dense: `tf.IndexedSlices` travel as dense tensors.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: with Average, gradients are divided by it before the
            sum, and multiplied by it and divided by the size after.
        num_groups: Horovod's former name of an integer for `groups`.
        groups: into how many operations to put all gradients, or the lists of
            variables that are put into one each.
        process_set: the ranks that take part. On others the result is like `gradtape`.
        scale_local_gradients: divide gradients of local sources by the size, so that
            they have the same weight as the others' average.

    Returns:
        A tape of a subclass of the class of `gradtape`.

    Raises:
        ValueError: a bad argument; the text is Horovod's where Horovod has one.
        TypeError: `gradtape` is no `tf.GradientTape`, or is distributed already.

    Example:
        >>> import ringjax.tensorflow as hvd, tensorflow as tf
        >>> hvd.init()
        >>> x = tf.Variable(3.0)
        >>> with tf.GradientTape() as tape:
        ...     y = x * x
        >>> float(hvd.DistributedGradientTape(tape).gradient(y, [x])[0])
        6.0
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"gradtape must be a tf.GradientTape, not {gradtape!r}")
    if isinstance(gradtape, _DistributedGradientTape):
        raise TypeError("gradtape is a DistributedGradientTape already")
    settings = GradientSettings(
        name=_NAME,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    plain = type(gradtape)
    kind = type(plain.__name__, (_DistributedGradientTape, plain), {})
    # Not through __init__: a class of the program's may want other arguments.
    tape: Any = object.__new__(kind)
    tape.__dict__.update(gradtape.__dict__)
    tape._recorder = gradtape
    tape._reduction = GradientReducer(settings)
    return tape


@do_not_convert
def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """`DistributedGradientTape` that leaves the gradients of some layers alone.

    Args:
        local_layers: a layer of Keras, or several: their trainable weights are this
            rank's own. None: no layer's.

    Other arguments, Returns, Raises: as `DistributedGradientTape`; also ValueError:
        `local_layers` has something that is no layer.

    Example:
        >>> import keras, ringjax.tensorflow as hvd, tensorflow as tf
        >>> hvd.init()
        >>> layer = keras.layers.Dense(1)
        >>> with tf.GradientTape() as tape:
        ...     y = layer(tf.ones((2, 3)))
        >>> tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer)
        >>> [g.shape[0] for g in tape.gradient(y, layer.trainable_weights)]
        [3, 1]
    """
    tape = DistributedGradientTape(
        *(gradtape, device_dense, device_sparse, compression, sparse_as_dense, op),
        *(gradient_predivide_factor, num_groups, groups, process_set),
        scale_local_gradients,
    )
    kind = tf.keras.layers.Layer
    for variable in local_variables(local_layers, kind, "tf.keras.layers.Layer type"):
        tape.register_local_source(variable)
    return tape
