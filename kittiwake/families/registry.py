"""Every family kittiwake knows: one line each."""

from __future__ import annotations

from kittiwake.checkpoints.reader import TensorSource
from kittiwake.errors import BundleError, ModelError
from kittiwake.families.contract import Family
from kittiwake.families.qwen4exp.family import Qwen4ExpFamily
from kittiwake.families.rwkv4 import Rwkv4Family
from kittiwake.families.rwkv5 import Rwkv5Family
from kittiwake.families.rwkv6 import Rwkv6Family
from kittiwake.families.rwkv7 import Rwkv7Family

FAMILIES: tuple[Family, ...] = (Rwkv4Family(), Rwkv5Family(), Rwkv6Family(), Rwkv7Family(), Qwen4ExpFamily())


def recognise(source: TensorSource) -> Family:
    """The family whose names the source has. Raises ModelError when none or several claim it."""
    claims = [family for family in FAMILIES if family.recognises(source)]
    if len(claims) == 1:
        return claims[0]
    known = ", ".join(family.name for family in FAMILIES)
    names = ", ".join(info.name for info in source.infos()[:4])
    if claims:
        raise ModelError(f"{source.path} looks like {' and '.join(family.name for family in claims)} at once")
    raise ModelError(
        f"{source.path} is no model kittiwake runs: {_guess(source)}its tensors begin with {names or 'nothing'}",
        f"supported families: {known}",
    )


def family_named(name: str) -> Family:
    """The family of this name. Raises BundleError for a name that is not known."""
    for family in FAMILIES:
        if family.name == name:
            return family
    raise BundleError(f"the bundle's family is {name!r}; known: {', '.join(family.name for family in FAMILIES)}")


def _guess(source: TensorSource) -> str:
    """A word on what a foreign checkpoint seems to be, or nothing."""
    if source.format == "gguf":
        return f"its architecture is {(source.config or {}).get('general.architecture')!r}; "
    names = {info.name for info in source.infos()}
    if any(".time_maa" in name for name in names):
        return "it seems to be RWKV-6; "
    if any("self_attn" in name or ".attn.c_attn" in name for name in names):
        return "it seems to be a transformer; "
    kind = (source.config or {}).get("model_type")
    return f"its config.json says {kind!r}; " if isinstance(kind, str) else ""
