"""One YAML, one frozen `Config`: flags over environment over file over default."""

from headrace.config.load import LoadedConfig, load_config, load_table
from headrace.config.overlay import parse_assignments
from headrace.config.schema import (
    AdminConfig,
    Choice,
    Config,
    EngineConfig,
    GatewayConfig,
    LoggingConfig,
    ModelConfig,
    PluginsConfig,
    PoliciesConfig,
    ReplicaConfig,
    ReplicaEntry,
    TelemetryConfig,
    TlsConfig,
    replica_config,
)

__all__ = [
    "AdminConfig",
    "Choice",
    "Config",
    "EngineConfig",
    "GatewayConfig",
    "LoadedConfig",
    "LoggingConfig",
    "ModelConfig",
    "PluginsConfig",
    "PoliciesConfig",
    "ReplicaConfig",
    "ReplicaEntry",
    "TelemetryConfig",
    "TlsConfig",
    "load_config",
    "load_table",
    "parse_assignments",
    "replica_config",
]
