from types import ModuleType

from lanewise import loaders


def test_every_public_name_is_listed_once_and_in_order() -> None:
    public = {
        name
        for name, value in vars(loaders).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert set(loaders.__all__) == public
    assert loaders.__all__ == sorted(set(loaders.__all__))
