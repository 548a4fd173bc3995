"""`posttrain doctor`: what this machine has, which backends will be used and why, and what to install."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pkgutil
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

OK, WARNING, MISSING = "ok", "warning", "MISSING"


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package that posttrain uses; `needed` ones must be there for the main job, `why` says what the others give."""

    name: str
    versions: str
    needed: bool
    why: str
    extra: str = ""


PACKAGES = (
    Package(name="torch", versions=">=2.11,<2.14", needed=True, why="everything"),
    Package(name="transformers", versions=">=5.17,<5.18", needed=True, why="models, tokenizers"),
    Package(name="trl", versions=">=1.16,<1.17", needed=True, why="SFT and GRPO trainers"),
    Package(name="accelerate", versions=">=1.15,<2", needed=True, why="under the trainers"),
    Package(name="ray", versions=">=2.60,<2.61", needed=True, why="processes"),
    Package(name="datasets", versions=">=5.2,<6", needed=True, why="hub data sets, SFT rows"),
    Package(name="math-verify", versions=">=0.9,<0.10", needed=True, why="verdicts on answers"),
    Package(name="pydantic", versions=">=2.11,<3", needed=True, why="recipes"),
    Package(name="pyarrow", versions=">=20", needed=True, why="rollout files"),
    Package(name="numpy", versions=">=1.26", needed=True, why="statistics"),
    Package(name="tensorboard", versions=">=2.19", needed=True, why="training curves"),
    Package(name="peft", versions=">=0.21,<1", needed=True, why="adapters"),
    Package(name="triton", versions=">=3.3", needed=False, why="GPU kernels"),
    Package(name="deepspeed", versions=">=0.19,<0.20", needed=False, why="recipes with a `deepspeed` section", extra="deepspeed"),
    Package(name="vllm", versions=">=0.26,<0.33", needed=False, why="teachers and Transformer baselines", extra="vllm"),
    Package(name="flash-linear-attention", versions=">=0.4", needed=False, why="comparison of kernels", extra="fla"),
    Package(name="liger-kernel", versions=">=0.8,<0.9", needed=False, why="trainer.use_liger_kernel", extra="liger"),
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    subject: str
    state: str
    text: str
    advice: str = ""


def doctor() -> int:
    """Print the report; 0 if the main job (SFT, GRPO, evaluation on this machine) can run, else 1."""
    findings = [python_version(), *machine(), *(package(item) for item in PACKAGES), *conflicts(), *backends()]
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(f"{finding.state:<8} {finding.subject:<{width}}  {finding.text}")
    advice = [finding.advice for finding in findings if finding.advice]
    if advice:
        print("\nto do:\n" + "\n".join(f"  {line}" for line in dict.fromkeys(advice)))
    broken = [finding.subject for finding in findings if finding.state == MISSING]
    if broken:
        print(f"\nthe main job cannot run here: {', '.join(broken)}")
    else:
        print("\nthe main job can run here: make demo, or posttrain run RECIPE")
    return 1 if broken else 0


def python_version() -> Finding:
    good = (3, 11) <= sys.version_info[:2] < (3, 14)
    return Finding(
        subject="python",
        state=OK if good else MISSING,
        text=f"{platform.python_version()} ({platform.machine()}, {platform.system()})",
        advice="" if good else "use Python 3.11, 3.12 or 3.13",
    )


def machine() -> list[Finding]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = shutil.disk_usage(".").free / 2**30
    findings = [
        Finding(subject="cpu", state=OK, text=f"{cores} cores, {memory:.0f} GiB memory"),
        Finding(
            subject="disk",
            state=OK if free > 5 else WARNING,
            text=f"{free:.0f} GiB free here",
            advice="" if free > 5 else "free some disk space: checkpoints are written beside the older ones before those go",
        ),
    ]
    return [*findings, gpu()]


def gpu() -> Finding:
    """What the driver says; torch's view is under `torch device`."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return Finding(subject="gpu", state=OK, text="no NVIDIA driver found: everything runs on the CPU")
    try:
        query = [command, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(subject="gpu", state=WARNING, text=f"nvidia-smi does not answer: {error}")
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not lines:
        return Finding(subject="gpu", state=WARNING, text=f"nvidia-smi: {(done.stderr or done.stdout).strip() or 'no device'}")
    return Finding(subject="gpu", state=OK, text=f"{len(lines)} x {lines[0]}" if len(set(lines)) == 1 else "; ".join(lines))


def installed(name: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def package(item: Package) -> Finding:
    version = installed(item.name)
    target = f'pip install -e ".[{item.extra}]"' if item.extra else f'pip install "{item.name}{item.versions}"'
    if version is None:
        if item.needed:
            return Finding(subject=item.name, state=MISSING, text=f"not installed ({item.why})", advice=target)
        # Extras are mentioned, not advised: the main job does not need them.
        return Finding(subject=item.name, state=OK, text=f"not installed (optional: {item.why}; {target})")
    if Version(version) not in SpecifierSet(item.versions, prereleases=True):
        return Finding(subject=item.name, state=WARNING, text=f"{version}, outside {item.versions} ({item.why})", advice=target)
    return Finding(subject=item.name, state=OK, text=f"{version} ({item.why})")


def conflicts() -> list[Finding]:
    """Pairs of versions that are known not to work together."""
    found = []
    triton, numpy = installed("triton"), installed("numpy")
    if triton and numpy and Version(triton) < Version("3.7.1") and Version(numpy) >= Version("2.4"):
        found.append(
            Finding(
                subject="triton with numpy",
                state=WARNING,
                text=f"{triton} with {numpy}: Triton's interpreter (kernel tests without GPU) fails; GPUs are not affected",
                advice='pip install "numpy<2.4" for the kernel tests without GPU',
            )
        )
    if installed("flash-linear-attention") and not _cuda():
        found.append(
            Finding(
                subject="flash-linear-attention",
                state=WARNING,
                text="importable on a machine without GPU: it breaks some of transformers' own models (Qwen3-Next) there",
            )
        )
    return found


def backends() -> list[Finding]:
    """Which code will run."""
    if importlib.util.find_spec("torch") is None:
        return [Finding(subject="kernels", state=MISSING, text="no backend without torch")]
    import torch

    cuda = torch.cuda.is_available()
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    device = f"cuda ({torch.cuda.device_count()} devices)" if cuda else "cpu"
    driver = gpu()
    mismatch = not cuda and driver.state == OK and "no NVIDIA driver" not in driver.text
    findings = [
        Finding(
            subject="torch device",
            state=WARNING if mismatch else OK,
            text=f"{device}, {build}" + (", although there is a GPU" if mismatch else ""),
            advice="install a torch build for this driver's CUDA version" if mismatch else "",
        )
    ]
    triton_kernels = _has_triton_kernels()
    if cuda and triton_kernels and installed("triton"):
        kernels = "triton for training of GLA layers; the gated delta rule, prefill and decoding in torch"
    else:
        reason = (
            "no GPU" if not cuda else "this version has no Triton kernels" if not triton_kernels else "Triton is not installed"
        )
        kernels = f"torch: chunked PyTorch ({reason})"
    findings.append(Finding(subject="sse kernels", state=OK, text=kernels))
    findings.append(Finding(subject="generator", state=OK, text=f"posttrain's own, inside the learner, on {device.split()[0]}"))
    spread = "nccl" if cuda else "gloo"
    zero = "ZeRO available" if installed("deepspeed") else "DDP (DeepSpeed is not installed)"
    findings.append(Finding(subject="training", state=OK, text=f"{zero}, collectives over {spread}"))
    return findings


def _has_triton_kernels() -> bool:
    spec = importlib.util.find_spec("posttrain.kernels.sse")
    folders = spec.submodule_search_locations if spec else None
    return any(module.name.startswith("triton") for module in pkgutil.iter_modules(folders or []))


def _cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
