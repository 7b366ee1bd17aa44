"""The README's programs run as they are printed."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_programs_run_one_after_another_as_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    loop, simulation = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len([line for line in loop.splitlines() if line.strip()]) <= 11
    exec(loop, names)
    assert names["optimizer"].updates == 300 - 8
    exec(simulation, names)
    assert names["trace"].accuracy.shape == (11, 3, 3, 3)
    assert names["trace"].accuracy[-1].max() > 0.9
    assert (tmp_path / "accuracy.png").exists()
