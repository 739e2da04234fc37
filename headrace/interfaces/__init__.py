"""Every contract a plugin can implement, one Protocol each."""

from headrace.interfaces.device import (
    AttentionSpec,
    Availability,
    Backend,
    BesideRunner,
    Clock,
    Group,
    Ops,
    RepeatingRunner,
    Runner,
    StepHandle,
)
from headrace.interfaces.model import (
    LoadedModel,
    LoadSettings,
    ModelArchitecture,
    QuantizedPart,
    TensorSource,
    TextAssets,
)
from headrace.interfaces.policies import (
    AdmissionPolicy,
    EvictionPolicy,
    QuantizationPolicy,
    RoutingPolicy,
    SchedulingPolicy,
)

__all__ = [
    "AdmissionPolicy",
    "AttentionSpec",
    "Availability",
    "Backend",
    "BesideRunner",
    "Clock",
    "EvictionPolicy",
    "Group",
    "LoadSettings",
    "LoadedModel",
    "ModelArchitecture",
    "Ops",
    "QuantizationPolicy",
    "QuantizedPart",
    "RepeatingRunner",
    "RoutingPolicy",
    "Runner",
    "SchedulingPolicy",
    "StepHandle",
    "TensorSource",
    "TextAssets",
]
