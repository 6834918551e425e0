"""Which version a request asks for. What was named is served or refused; never the base instead.

    model                            version
    `base`, the base's served name   none: the base
    `argon`                          argon's active version
    `argon@7`                        argon's version 7
    `base:argon`, `name:argon@7`     the same, as SGLang spells it
    the base + lora_path `argon`     the same, as a field

An exact match comes first, then the split: a base served as `org/model:fp8` is still found.
"""

from .catalog import BASE, Catalog, Version, parse_number
from .errors import InvalidRequest, NotFound


def select(catalog: Catalog, model: str, lora_path: str | None = None) -> Version | None:
    """The version that answers; None when the base was named.

    Raises NotFound (code `model_not_found`) for an unknown model, adapter or version and for an adapter
    without an active version, InvalidRequest when `model` and `lora_path` name two adapters.
    """
    bases = (BASE, catalog.base_name)
    if lora_path is None:
        return None if model in bases else _version(catalog, _without_base(model, bases), "model", model)
    if model in bases:
        return _version(catalog, lora_path, "lora_path", lora_path)
    named = _without_base(model, bases)
    if named == lora_path or named.partition("@")[0] == lora_path:
        return _version(catalog, named, "model", model)
    raise InvalidRequest(
        f"model {model!r} and lora_path {lora_path!r} name different things; with lora_path, model must be"
        f" {BASE!r}, {catalog.base_name!r} or the same adapter",
        param="lora_path",
    )


def _without_base(model: str, bases: tuple[str, str]) -> str:
    for base in bases:
        if model.startswith(f"{base}:"):
            return model.removeprefix(f"{base}:")
    return model


def _version(catalog: Catalog, text: str, param: str, asked: str) -> Version:
    """The version that `adapter` or `adapter@n` names."""
    name, at, number = text.partition("@")
    record = catalog.adapters.get(name)
    if record is None:
        raise _not_found(f"model {asked!r} does not exist; GET /v1/models lists those that do", param)
    if at:
        version = record.versions.get(parse_number(number) or 0)
        if version is None:
            raise _not_found(
                f"model {asked!r} does not exist: adapter {name!r} has no version {number!r};"
                f" GET /v1/adapters/{name}/versions lists those it has",
                param,
            )
        return version
    if record.active is None:
        raise _not_found(
            f"adapter {name!r} has no active version; activate one with"
            f" POST /v1/adapters/{name}/versions/{{n}}/activate or ask for {name}@{{n}}",
            param,
        )
    return record.active


def _not_found(message: str, param: str) -> NotFound:
    return NotFound(message, param=param, code="model_not_found")
