"""The vLLM that runs, its version and its platform; which versions are served, and from which one on some features are.

Whatever depends on the version asks here. A refusal says what would be right.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

import vllm
import vllm.platforms

from kvpolicy.errors import KVPolicyError
from kvpolicy_vllm.plugin.connector_list import has_set

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.platforms import Platform

OLDEST = (0, 24)
NEWEST = (0, 33)
OLDEST_WITH_TABLES = (0, 32)
"""For all but one group of full attention. Earlier versions take a failed load by its blocks, which they refuse where
there are several groups, and lay out the KV cache in another way."""
OLDEST_WITH_DEFERRED_FREES = (0, 30)
"""For blocks that come free a step late. Earlier versions preempt request after request for them."""
WITHIN_A_BLOCK_OF_STATES = (0, 32)
"""The version whose CPU build was seen to end beyond one. On earlier ones states are not served; of later ones no CPU
build is published, and one from sources is taken to end, too, as none was seen to come through."""
WITHOUT_PLUGIN = "run this engine without the kvpolicy flags"
BETWEEN_RELEASES = re.compile(r"\d(a|b|rc)\d|\.dev\d")
"""A release candidate, or a build from untagged sources. Not refused, since nearly all of its code is that of a release
and refusing would exclude all users who build vLLM."""

logger = logging.getLogger(f"vllm.{__name__}")


class UnsupportedEngine(KVPolicyError):
    """The engine has an unsupported version or configuration; the message says what would be right."""


def engine_version(allow_untested: bool = False) -> tuple[int, int]:
    """(major, minor) of the running vLLM; for a build without a version, the newest that was tested.

    Raises :class:`UnsupportedEngine` outside the tested range, above it only where ``allow_untested`` is not set.
    """
    version = _parsed_version()
    if version is None or version > NEWEST:
        if not allow_untested:
            raise UnsupportedEngine(_untested_message(version))
        return version or NEWEST
    if version < OLDEST:
        raise UnsupportedEngine(f"vLLM {vllm.__version__} is older than what kvpolicy serves: install {_range()}")
    return version


def warn_untested() -> None:
    """Log a warning where the running vLLM is not one of the tested releases."""
    version = _parsed_version()
    if version is not None and version <= NEWEST and not BETWEEN_RELEASES.search(vllm.__version__):
        return
    logger.warning(
        "kvpolicy: vLLM %s is taken as %s; tested are the releases %s. Whatever has changed beside them may show as "
        "errors at the start, or as requests that stall",
        vllm.__version__, ".".join(map(str, version or NEWEST)), _range(),
    )  # fmt: skip


def _parsed_version() -> tuple[int, int] | None:
    """(major, minor), or None for a build from source without a version, which vLLM calls ``dev`` or 0.1.dev1."""
    match = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    return None if version == (0, 0) or (version == (0, 1) and "dev" in vllm.__version__) else version


def _untested_message(version: tuple[int, int] | None) -> str:
    untested = (
        'to try it all the same, set "allow_untested_version": true in kv_connector_extra_config (kvpolicy serve '
    )
    untested += "and config: --allow-untested-version)"
    if version is not None:
        return (
            f"vLLM {vllm.__version__} is newer than what kvpolicy was tested with: install {_range()}, or, {untested}"
        )
    return (
        f"vLLM calls itself {vllm.__version__!r}, as a build from sources without their tags does; kvpolicy serves "
        f"{_range()}: build it with its tags or with VLLM_VERSION_OVERRIDE set to the release it comes from, or, "
        f"{untested}"
    )


def _range() -> str:
    return f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def allows_untested(config: VllmConfig) -> bool:
    """Whether the settings allow an untested vLLM."""
    return has_set(config, "allow_untested_version")


def refuse_older(config: VllmConfig, what: str, instead: str = WITHOUT_PLUGIN) -> None:
    """Raise :class:`UnsupportedEngine` below :data:`OLDEST_WITH_TABLES`, for ``what`` is served from there on."""
    if engine_version(allow_untested=allows_untested(config)) < OLDEST_WITH_TABLES:
        raise UnsupportedEngine(older_message(what, instead))


def older_message(what: str, instead: str) -> str:
    """That ``what`` is served from :data:`OLDEST_WITH_TABLES` on; ``instead``: what would be right."""
    oldest = ".".join(map(str, OLDEST_WITH_TABLES))
    return f"kvpolicy does not serve {what} on a vLLM older than {oldest}; {instead}"


def platform() -> Platform:
    """The platform that vLLM runs on."""
    return vllm.platforms.current_platform
