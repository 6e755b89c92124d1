"""The settings of `--help` under headings: over 40 in one list are read by nobody."""

import click

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Model",
        ("model", "revision", "served_model_name", "device", "dtype", "quantization", "load_format", "cpu_threads"),
    ),
    ("Addresses", ("host", "port", "http_port", "no_http", "metrics_port", "otlp_traces_endpoint")),
    (
        "Memory",
        (
            *("max_model_len", "kv_cache_memory_bytes", "kv_cache_dtype", "gpu_memory_utilization", "block_size"),
            "enable_prefix_caching",
        ),
    ),
    (
        "Batches and queues",
        (
            *("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "long_prefill_token_threshold"),
            *("max_queued_requests", "max_queued_requests_per_tenant", "stream_interval", "batch_invariant"),
        ),
    ),
    (
        "Chats and sampling",
        (
            *("chat_template", "default_chat_template_kwargs", "escape_special_tokens", "enable_auto_tool_choice"),
            *("tool_call_parser", "generation_config", "override_generation_config", "max_logprobs", "seed"),
        ),
    ),
    (
        "Who may call",
        (
            *("api_key_file", "allowed_hosts", "allowed_origins", "max_message_bytes"),
            *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs"),
        ),
    ),
    (
        "Connections and shutdown",
        (
            *("grace", "keepalive_time", "keepalive_timeout", "keepalive_permit_without_calls", "min_ping_interval"),
            "watchdog_seconds",
        ),
    ),
)


class GroupedCommand(click.Command):
    """A command whose settings are listed by group, and its own options behind them."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write them."""
        records = {p.name: record for p in self.get_params(ctx) if (record := p.get_help_record(ctx)) is not None}
        for heading, names in GROUPS:
            rows = [records.pop(name) for name in names if name in records]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)
        with formatter.section("Options"):
            formatter.write_dl(list(records.values()))
