"""Results of a grid are kept whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy.study.cache import ResultCache


def test_results_are_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    kept, digest = ResultCache(tmp_path / "cells"), "ab" * 32
    assert kept.find(digest) is None
    kept.store(digest, {"digest": digest, "value": 1.5})
    assert kept.find(digest) == {"digest": digest, "value": 1.5}
    assert [path.name for path in (tmp_path / "cells" / "ab").iterdir()] == [f"{digest}.json"]
    (tmp_path / "cells" / "ab" / f"{digest}.json").write_text('{"digest": "ab')
    assert kept.find(digest) is None
    kept.store(digest, {"digest": "other"})
    assert kept.find(digest) is None, "a file that is not of this digest is none"


def test_what_json_cannot_hold_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        ResultCache(tmp_path).store("cd", {"digest": "cd", "value": float("nan")})
    assert ResultCache(tmp_path).find("cd") is None
