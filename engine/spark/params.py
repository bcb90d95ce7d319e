"""What estimators and their models have in common: parameters in JSON, and what is no JSON in a file beside them."""

from __future__ import annotations

from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter

OBJECTS = "objects.pkl"


def param(name: str, doc: str, convert: Any = TypeConverters.identity) -> Param[Any]:
    """A parameter, as a class attribute of a stage."""
    return Param(Params._dummy(), name, doc, convert)


class Stage(Params, MLWritable, MLReadable[Any]):
    """A stage of a pipeline whose parameters are its class attributes of type `Param`, and which is saved and loaded.

    What `OBJECT_NAMES` names are attributes of any kind. They are pickled, in `OBJECTS` beside the parameters, so that
    loading a stage runs code: load what trusted users have saved.
    """

    OBJECT_NAMES: tuple[str, ...] = ()

    def _fill(self, given: dict[str, Any]) -> None:
        """Take parameters and objects by name; None leaves the default.

        Raises
        ------
        TypeError
            There is none of that name.
        """
        for name, value in given.items():
            if name in self.OBJECT_NAMES:
                setattr(self, f"_{name}", value)
            elif not self.hasParam(name):
                known = sorted({*self.OBJECT_NAMES, *(each.name for each in self.params)})
                raise TypeError(f"{type(self).__name__} has no parameter {name!r}; it has {', '.join(known)}")
            elif value is not None:
                self.set(self.getParam(name), value)

    def _value(self, param: Param[Any]) -> Any:
        """The value of a parameter, None if it has neither that nor a default."""
        return self.getOrDefault(param) if self.isDefined(param) else None

    def _packed(self) -> Any:
        """What is pickled of the objects: unpickled, it is a dict of them."""
        return {name: getattr(self, f"_{name}") for name in self.OBJECT_NAMES}

    def write(self) -> MLWriter:
        """What saves this stage."""
        return _Writer(self)

    @classmethod
    def read(cls) -> MLReader[Any]:
        """What loads a stage of this class."""
        return _Reader(cls)


class _Writer(DefaultParamsWriter):
    """Saves parameters as Spark does, and the objects by fsspec."""

    def saveImpl(self, path: str) -> None:
        from fsspec.core import open as open_file
        from pyspark import cloudpickle

        super().saveImpl(path)
        stage = self.instance
        assert isinstance(stage, Stage)
        with open_file(f"{path.rstrip('/')}/{OBJECTS}", "wb") as file:
            cloudpickle.dump(stage._packed(), file)


class _Reader(DefaultParamsReader[Any]):
    """Loads what `_Writer` has saved."""

    def load(self, path: str) -> Any:
        import pickle

        from fsspec.core import open as open_file

        stage = super().load(path)
        with open_file(f"{path.rstrip('/')}/{OBJECTS}", "rb") as file:
            stage._fill(pickle.load(file))
        return stage
