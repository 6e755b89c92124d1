"""`import engine`: cheap, and with the names it promises."""

import subprocess
import sys

import pytest

import engine


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, engine; names = set(sys.modules); "
        "assert not names & {'asyncio', 'numpy', 'tokenizers', 'jinja2', 'grpc', 'uvloop'}, names; "
        "assert not any(n.startswith('engine.') for n in names); "
        "from engine import EngineConfig, SamplingParams; assert 'uvloop' not in sys.modules; "
        "assert {'LLM', 'Engine', '__version__'} <= set(dir(engine)); print(engine.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="LMM"):
        engine.LMM  # noqa: B018
