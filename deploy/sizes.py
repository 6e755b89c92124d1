"""`python deploy/sizes.py`: what each variant's environment weighs, installed as the Dockerfile does, without docker.

The weight is what the files of the environment take on disk, Python itself not counted: it is the base image's.
Exit code 1 when a variant is above its limit.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SERVING = "http,router,structured"
MB = 1_000_000


@dataclass(frozen=True)
class Variant:
    """What one image holds.

    Attributes:
        limit: MB that it may weigh.
        cubins: architectures whose kernels are compiled into it, instead of having NVRTC there.
    """

    name: str
    extras: str
    limit: int
    cubins: str = ""


VARIANTS = (
    Variant("cpu, gRPC only", "cpu", 450),
    Variant("cpu", f"cpu,{SERVING}", 450),
    Variant("cuda12, kernels compiled", f"cuda12,{SERVING}", 600, "sm_80,sm_89,sm_90"),
    Variant("cuda12, with NVRTC", f"cuda12,{SERVING}", 750),
    Variant("cuda13, kernels compiled", f"cuda13,{SERVING}", 600, "sm_80,sm_89,sm_90"),
    Variant("cuda13, with NVRTC", f"cuda13,{SERVING}", 750),
    Variant("cuda12, cuBLAS", f"cuda12,cublas12,{SERVING}", 1500),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Weigh the environment of each image.")
    parser.add_argument("--only", default="", help="Variants whose name begins so.")
    parser.add_argument("--packages", type=int, default=0, metavar="N", help="Show the N heaviest packages of each.")
    options = parser.parse_args()
    heavy = []
    with tempfile.TemporaryDirectory() as name:
        wheel = build_wheel(Path(name))
        print(f"{'MB':>6} {'limit':>6}  variant")
        for number, variant in enumerate(v for v in VARIANTS if v.name.startswith(options.only)):
            prefix = install(variant, wheel, Path(name) / str(number))
            weight = size(prefix) / MB
            print(f"{weight:6.0f} {variant.limit:6}  {variant.name} [{variant.extras}]", flush=True)
            for package, share in heaviest(prefix, options.packages):
                print(f"{share / MB:20.0f}  {package}")
            if weight > variant.limit:
                heavy.append(variant.name)
    if heavy:
        sys.exit(f"above the limit: {', '.join(heavy)}")


def build_wheel(folder: Path) -> Path:
    """The wheel of this checkout."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(variant: Variant, wheel: Path, prefix: Path) -> Path:
    """Run deploy/install.sh; returns the environment's folder. The cache is a throw-away one, as in an image."""
    environment = {
        **os.environ,
        "CUBINS": variant.cubins,
        "PYTHON": sys.executable,
        "XDG_CACHE_HOME": f"{prefix}.cache",
    }
    command = [str(ROOT / "deploy" / "install.sh"), str(prefix), variant.extras, str(wheel)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return prefix


def size(path: Path) -> int:
    """Bytes of the files below `path`, links not followed."""
    return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())


def heaviest(prefix: Path, count: int) -> list[tuple[str, int]]:
    """The largest entries of site-packages, largest first."""
    (site,) = prefix.glob("lib/python*/site-packages")
    entries = [(entry.name, size(entry)) for entry in site.iterdir() if entry.is_dir()]
    return sorted(entries, key=lambda entry: -entry[1])[:count]


if __name__ == "__main__":
    main()
