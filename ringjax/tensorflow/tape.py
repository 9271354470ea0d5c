"""DistributedGradientTape: a `tf.GradientTape` with gradients reduced over all ranks.

gradients.py reduces the gradients.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import tensorflow as tf

from ringjax.horovod.functions import local_variables
from ringjax.ops import Average
from ringjax.tensorflow.autograph import do_not_convert
from ringjax.tensorflow.compression import Compression, Compressor
from ringjax.tensorflow.gradients import GradientBucketReducer, GradientSettings
from ringjax.tensorflow.tf_types import Gradient, Groups, Structure, Variable
from ringjax.world.process_set import ProcessSet, global_process_set

Pairs: TypeAlias = list[tuple[Variable, Gradient]]


class _DistributedGradientTape(tf.GradientTape):
    """The methods that a distributed tape adds to the class of the plain tape."""

    _reducer: GradientBucketReducer
    _recorder: tf.GradientTape  # the tape from which the distributed tape was made

    @property
    def process_set(self) -> ProcessSet:
        return self._reducer.settings.process_set

    @property
    def scale_local_gradients(self) -> bool:
        return self._reducer.settings.scale_local_gradients

    def _pop_tape(self) -> None:
        super()._pop_tape()
        # If this tape was made inside of the `with` block of `_recorder`, the block
        # ends later, and `_recorder` must not pop the tape a second time.
        self._recorder._recording = False

    def register_local_source(self, source: Variable) -> None:
        """Makes a source local: its gradients are not reduced."""
        self._reducer.register_local(source)

    @do_not_convert
    def gradient(
        self,
        target: Structure,
        sources: Structure,
        output_gradients: Structure = None,
        use_generic_names: bool = False,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Structure:
        """Returns the gradients of `target`, reduced over all ranks.

        `use_generic_names` is an argument of Horovod without effect, because names
        never depend on the sources. All other arguments are TensorFlow's.
        """
        # The fourth argument of TensorFlow's method is `unconnected_gradients`.
        if isinstance(use_generic_names, tf.UnconnectedGradients | str):
            unconnected_gradients = use_generic_names
        found = super().gradient(
            target, sources, output_gradients, unconnected_gradients
        )
        gradients = tf.nest.flatten(found)
        reduced = self._reducer(gradients, tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(found, reduced)

    @do_not_convert
    def get_local_and_global_gradients(
        self,
        target: Structure,
        sources: Structure,
        output_gradients: Structure = None,
        use_generic_names: bool = False,
    ) -> tuple[Pairs, Pairs]:
        """Returns (source, gradient) pairs: those of local sources, then all others."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(
            zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True)
        )
        is_local = self._reducer.is_local
        return (
            [pair for pair in pairs if is_local(pair[0])],
            [pair for pair in pairs if not is_local(pair[0])],
        )


@do_not_convert
def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Makes a tape like `gradtape` whose `gradient` is reduced over all ranks.

    All ranks must call `gradient` with the same sources, in the same order of calls, in
    eager mode or inside of `tf.function`. Gradients travel in buckets of
    RINGJAX_BUCKET_BYTES, each as soon as its gradients are computed.

    Args:
        gradtape: a tape, before, during or after its recording.
        device_dense, device_sparse: arguments of Horovod without effect.
        compression: the representation on the wire, for instance `Compression.fp16`.
        sparse_as_dense: whether `tf.IndexedSlices` are sent as dense tensors.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: with Average, gradients are divided by this factor
            before the sum; the sum is multiplied by the factor and divided by the size.
        num_groups: Horovod's former name of an integer for `groups`.
        groups: the number of operations for all gradients, or lists of variables whose
            gradients travel in one operation each.
        process_set: the ranks that take part. On other ranks the result works like
            `gradtape`.
        scale_local_gradients: whether gradients of local sources are divided by the
            size, so that they have the same weight as other gradients have in an
            average.

    Returns:
        A tape of a subclass of the class of `gradtape`.

    Raises:
        ValueError: an argument is wrong; the text is Horovod's if Horovod has one.
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
    del device_dense, device_sparse
    settings = GradientSettings(
        name="DistributedGradientTape",
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
    # Do not call __init__, because a program's own class may require other arguments.
    tape: Any = object.__new__(kind)
    tape.__dict__.update(gradtape.__dict__)
    tape._recorder = gradtape
    tape._reducer = GradientBucketReducer(settings)
    return tape


@do_not_convert
def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> tf.GradientTape:
    """Makes a `DistributedGradientTape` that leaves out the gradients of some layers.

    Args:
        local_layers: a layer of Keras, or several layers, whose trainable weights are
            local; None means no layer.

    Other arguments, Returns, Raises: as `DistributedGradientTape`; also ValueError:
        `local_layers` contains an object that is no layer.

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
    # All other arguments are arguments of `DistributedGradientTape`.
    options = {key: value for key, value in locals().items() if key != "local_layers"}
    tape = DistributedGradientTape(**options)
    kind = tf.keras.layers.Layer
    for variable in local_variables(local_layers, kind, "tf.keras.layers.Layer type"):
        tape.register_local_source(variable)
    return tape
