"""Finds what a profile must know before its first engine starts: ``python -m kvpolicy_vllm.bench.inspect_model``.

Takes one job, ``{"llm": MODEL or null, "make": FOLDER, "seed": ..., "flags": [FLAG, ...] or absent}``, makes the small
model in ``make`` if ``llm`` is null (``"shape"``: further arguments of :func:`make_llama`), and answers ``{"llm":
MODEL, "device": whether there is an accelerator, "server": null, "refused": ""}``. With ``flags``, a server's, the
plugin's included, ``server`` has the fields of :class:`kvpolicy_vllm.bench.own_server.OwnServer` that vLLM finds, or
``refused`` says why there is none. A process of its own, since importing vLLM takes seconds and binds the process to
cores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from kvpolicy.errors import InputError, KVPolicyError
from kvpolicy_vllm.bench.engine_flags import server_arguments, server_config
from kvpolicy_vllm.bench.engine_process import jobs
from kvpolicy_vllm.bench.models import make_llama
from kvpolicy_vllm.bench.profile_parts import tables_of
from kvpolicy_vllm.bench.weightless import laid_out
from kvpolicy_vllm.plugin.config_refusals import refuse_unsupported
from kvpolicy_vllm.plugin.engine_config import geometry_of
from kvpolicy_vllm.plugin.kv_layout import block_bytes, block_size, is_plain, kept_layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def main() -> None:
    for job, answer in jobs():
        llm = job["llm"] or str(make_llama(job["make"], job["seed"], **job.get("shape", {})))
        found = {"llm": llm, "device": not current_platform.is_cpu(), "server": None, "refused": ""}
        if job.get("flags") is not None:
            try:
                found["server"] = server_of([llm, *job["flags"]])
            except KVPolicyError as error:
                found["refused"] = str(error)
        answer("result", found)


def server_of(flags: list[str]) -> dict[str, Any]:
    """What a profile must know of the server with these flags, ``[LLM, FLAG, ...]``.

    Raises InputError where there are several engine cores or tokens are drafted, RefusedByVllm and UnsupportedEngine as
    it would not start.
    """
    arguments = server_arguments(flags)
    gives_length = isinstance(arguments.max_model_len, int) and arguments.max_model_len > 0
    config = server_config(arguments)
    parallel, scheduler = config.parallel_config, config.scheduler_config
    if parallel.data_parallel_size > 1:
        raise InputError(
            f"--data-parallel-size is {parallel.data_parallel_size}: one engine core is measured, whose costs are "
            "those of every other; leave the flag out here, and give it to the server"
        )
    # A drafter with KV of its own has blocks ahead of the tokens: no request would ever be seen to lack one.
    if config.speculative_config is not None:
        raise InputError(
            "the server drafts: an engine that does is not measured; leave --speculative-config and --spec-... out "
            "here, and where LLM is a drafter, name the model that it drafts for. A server that drafts by ngram takes "
            "what is measured; one whose drafter keeps KV of its own does not, since its blocks have more bytes"
        )
    return _blocks_of(config) | {
        "batched_tokens": scheduler.max_num_batched_tokens,
        "max_requests": scheduler.max_num_seqs,
        "model_tokens": config.model_config.max_model_len,
        "gives_length": gives_length,
    }


def _blocks_of(config: VllmConfig) -> dict[str, Any]:
    """Tokens in a block, block tables of a request, whether one is of states, and the KV bytes of a token over all of
    the tables and all ranks.

    vLLM makes blocks larger once it knows the layers: one of attention has to hold as many bytes as a state. So the
    layers are made, without weights. Where that cannot be done, all is as the configuration says. Raises
    UnsupportedEngine for layers that the plugin does not serve.
    """
    ranks = int(config.parallel_config.tensor_parallel_size)
    try:
        kv_cache = laid_out(config)
    # The model's own error, or one of a model that needs its weights or a device to be made.
    except Exception:  # noqa: BLE001
        windows_whole = bool(config.scheduler_config.disable_hybrid_kv_cache_manager)
        return {
            "block_size": config.cache_config.block_size,
            "block_tables": tables_of(config.model_config.hf_config.to_dict(), windows_whole),
            "keeps_states": bool(config.model_config.is_hybrid),
            "kv_token_bytes": geometry_of(config).kv_bytes_per_token * ranks,
        }
    refuse_unsupported(config, kv_cache)
    size, tables = block_size(kv_cache), 1 if is_plain(kv_cache) else len(kv_cache.kv_cache_groups)
    rank_bytes = block_bytes(kv_cache)
    return {
        "block_size": size,
        "block_tables": tables,
        "keeps_states": kept_layers(kv_cache).state_layers > 0,
        "kv_token_bytes": -(-tables * rank_bytes * ranks // size),
    }


if __name__ == "__main__":
    main()
