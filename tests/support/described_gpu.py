"""The description of a GPU for which XLA compiles programs without a GPU; a model."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 patch: 0 }
gpu_device_info {
  name: "NVIDIA H200"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  device_memory_size: 151397597184
  l2_cache_size: 52428800
  device_address_bits: 64
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
}
"""
BATCH, WIDTH, LAYERS = 4096, 1024, 6
MATRIX = 4 * WIDTH * WIDTH  # bytes of a layer's weights in float32
F32, BF16 = jnp.float32, jnp.bfloat16
Shape = jax.ShapeDtypeStruct
ROWS = (Shape((BATCH, WIDTH), F32), Shape((BATCH, WIDTH), F32))


def gpus(count: int) -> Any:
    """Returns `count` described GPUs of one process. Needs JAX's CUDA plugin."""
    plugins = "jax_cuda12_plugin", "jax_cuda13_plugin"
    assert any(map(find_spec, plugins)), "make gpu-schedule installs JAX's CUDA plugin"
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=H200, topology=f"1x1x{count}"
    )
    return np.array(topology.devices)


def dense(dtype: Any = F32) -> dict[str, dict[str, Any]]:
    shapes = {"w": (WIDTH, WIDTH), "b": (WIDTH,)}
    layer = {name: Shape(shape, dtype) for name, shape in shapes.items()}
    return {f"layer_{i}": layer for i in range(LAYERS)}


def dense_loss(params: Mapping[str, Any], batch: Any) -> Any:
    x, y = (z.astype(params["layer_0"]["w"].dtype) for z in batch)
    for i in range(LAYERS):
        layer = params[f"layer_{i}"]
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x - y).astype(F32) ** 2)
