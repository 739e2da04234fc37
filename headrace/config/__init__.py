"""One YAML, one frozen `Config`: flags over environment over file over default."""

from headrace.config.load import LoadedConfig, load_config
from headrace.config.overlay import parse_assignments
from headrace.config.schema import (
    Choice,
    Config,
    EngineConfig,
    GatewayConfig,
    LoggingConfig,
    ModelConfig,
    PluginsConfig,
    PoliciesConfig,
    ReplicaConfig,
    replica_config,
)

__all__ = [
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
    "load_config",
    "parse_assignments",
    "replica_config",
]
