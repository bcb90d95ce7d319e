"""Explanations of failed calls of CUDA and NCCL, with remedies."""

from __future__ import annotations

from collections.abc import Mapping

from ..config.setting import variable_name

GIVEN_UP = -1  # error code of a call after which the CUDA thread was cancelled
KERNELS_OF_NCCL = "cuStreamQuery"  # by it the CUDA thread waits for warm-up kernels, which wait for the other ranks

_RESULTS = (  # names of NCCL's results, by code
    "ncclSuccess",
    "ncclUnhandledCudaError",
    "ncclSystemError",
    "ncclInternalError",
    "ncclInvalidArgument",
    "ncclInvalidUsage",
    "ncclRemoteError",
    "ncclInProgress",
)
_MORE = "NCCL_DEBUG=INFO shows what NCCL does"
_NCCL_HINTS = {
    1: "GPUs may not reach each other's memory, as in a container or a virtual machine: NCCL_P2P_DISABLE=1 does "
    f"without; {_MORE}",
    2: "in a container /dev/shm may be too small (docker run --shm-size=1g; NCCL_SHM_DISABLE=1 does without), or there "
    f"is no network interface that NCCL may use (NCCL_SOCKET_IFNAME=lo suffices on one host); {_MORE}",
    3: f"NCCL is at fault, or memory was overwritten; {_MORE}",
    4: f"the ranks may use different versions of NCCL or of the engine; {_MORE}",
    5: f"the ranks may share a GPU, or use different versions of NCCL; {_MORE}",
    6: f"another rank failed first, see there, or cannot be reached over the network; {_MORE}",
}
_CUDA_HINTS = {
    2: "other processes use the GPU's memory (nvidia-smi lists them)",
    3: "the driver has not been initialised",
    100: "the process sees no GPU: look at CUDA_VISIBLE_DEVICES, and at `nvidia-smi -L` in the same container",
    101: "look at CUDA_VISIBLE_DEVICES",
    218: "the file kernels.ptx is damaged: install the engine again",
    222: "the driver is older than the engine's kernels, which need one for CUDA 9.0: install a newer one",
    223: "kernels are compiled by the driver when they are loaded, which is switched off: unset CUDA_DISABLE_PTX_JIT",
    802: "the GPUs' fabric is not ready: start NVIDIA's fabric manager",
    803: "the driver's library and its kernel module are of different versions: restart the machine, or the container",
}
_STICKY = range(700, 800)  # a kernel has failed, and the context with it
LEFT = (
    "the GPU, or a call of CUDA in another thread, does not come to an end; the engine's memory, stream and kernels on "
    "it are left as they are until the process ends"
)


def explain_failure(failure: tuple[str, int, str, str], seconds: float, identity: Mapping[str, int | str]) -> str:
    """Explain why a job of the CUDA thread failed.

    `failure` is `CudaThread.failure`: the call, its error code, and the code's name and text. `seconds` is the time
    limit, for a job that was given up, and `identity` the rank's `CudaThread.identity`.
    """
    call, code, name, text = failure
    if code == GIVEN_UP:
        given_up = f"the wait for {call} was given up after {seconds:g} s ({variable_name('start_timeout')})"
        if call.startswith("nccl") or call == KERNELS_OF_NCCL:
            return f"{given_up}: other ranks have not come, or cannot be reached; {_MORE}"
        return f"{given_up}: the driver is slow, as where other processes keep the GPU or the machine busy"
    if call.startswith("nccl"):
        result = _RESULTS[code] if code < len(_RESULTS) else str(code)
        hint = _NCCL_HINTS.get(code, _MORE)
        return f"{call} returned {result}, {text}: {hint}"
    hint = _CUDA_HINTS.get(code, "")
    if call == "cuDeviceGet":
        hint = f"the process sees {identity['devices']} GPUs; {_CUDA_HINTS[101]}"
    if code in _STICKY and not hint:
        hint = "it may be the fault of a kernel that ran before: CUDA_LAUNCH_BLOCKING=1 finds which"
    told = f", {text}" if text and text != name else ""
    return f"{call} returned {name or code}{told}" + (f": {hint}" if hint else "")


def not_connected(call: str | None, seconds: float) -> str:
    """Explain that the communicator of a process set was not connected in time."""
    return (
        f"its communicator was not connected within {seconds:g} s ({variable_name('start_timeout')}): "
        f"{call or 'it'} waits for other ranks; {_MORE}"
    )


def explain_stuck_call(call: str | None, seconds: float) -> str:
    """Explain that a call did not return and its thread is abandoned."""
    return (
        f"{call or 'a call'} has not returned for {seconds:g} s: the driver or the GPU hangs (dmesg may show an Xid, "
        "nvidia-smi whether it answers). This process cannot use the GPU any more, and has to be started again"
    )
