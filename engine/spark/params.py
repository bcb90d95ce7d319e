"""Base class of estimators and their models: parameters are saved as JSON, and other objects as a pickle."""

from __future__ import annotations

from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter

from .. import __version__
from ..errors.formatting import format_exception
from ..launch.errors import LaunchError
from .saved_pickles import load_pickle

OBJECTS = "objects"  # directory of the pickle
PIECE = 32 << 20  # bytes of the pickle in a row


def make_param(name: str, doc: str, convert: Any = TypeConverters.identity) -> Param[Any]:
    """Create a parameter, as a class attribute of a stage."""
    return Param(Params._dummy(), name, doc, convert)


class SavedStage(Params, MLWritable, MLReadable[Any]):
    """Stage of a pipeline that can be saved and loaded; its parameters are its class attributes of type `Param`.

    `OBJECT_NAMES` names attributes of any type. They are pickled, in `OBJECTS` beside the parameters. So loading a
    stage runs code: load only stages that trusted users have saved. Spark writes both, so that a path means one place.
    """

    OBJECT_NAMES: tuple[str, ...] = ()
    NOT_SAVED: tuple[str, ...] = ()  # names among these that a loaded stage lacks

    def _set_values(self, given: dict[str, Any]) -> None:
        """Set parameters and objects by name; None leaves the default.

        Raises TypeError if no parameter or object has that name.
        """
        for name, value in given.items():
            if name in self.OBJECT_NAMES:
                setattr(self, f"_{name}", value)
            elif not self.hasParam(name):
                known = sorted({*self.OBJECT_NAMES, *(each.name for each in self.params)})
                raise TypeError(f"{type(self).__name__} has no parameter {name!r}; it has {', '.join(known)}")
            elif value is not None:
                self.set(self.getParam(name), value)

    def _get_value(self, param: Param[Any]) -> Any:
        """Return the value of a parameter; None if it has neither a value nor a default."""
        return self.getOrDefault(param) if self.isDefined(param) else None

    def _pack_objects(self) -> Any:
        """Return the object that is pickled; unpickled, it is a dict of the objects."""
        return {name: getattr(self, f"_{name}") for name in self.OBJECT_NAMES if name not in self.NOT_SAVED}

    def write(self) -> MLWriter:
        """Return the writer that saves this stage."""
        return _Writer(self)

    @classmethod
    def read(cls) -> MLReader[Any]:
        """Return the reader that loads a stage of this class."""
        return _Reader(cls)


class _Writer(DefaultParamsWriter):
    """Writer that saves parameters as Spark does, and the objects as rows of a Parquet file."""

    def saveImpl(self, path: str) -> None:
        from pyspark import cloudpickle

        stage, spark = self.instance, self.sparkSession
        assert isinstance(stage, SavedStage)
        data = cloudpickle.dumps(stage._pack_objects())
        self.saveMetadata(stage, path, spark, {"engineVersion": __version__})
        pieces = [(number, data[at : at + PIECE]) for number, at in enumerate(range(0, len(data), PIECE))]
        frame = spark.createDataFrame(pieces, "number int, data binary")
        frame.coalesce(1).write.parquet(f"{path.rstrip('/')}/{OBJECTS}")


class _Reader(DefaultParamsReader[Any]):
    """Reader of stages that `_Writer` has saved."""

    def load(self, path: str) -> Any:
        """Load the stage; raise LaunchError if another version has saved it, and this one cannot load it."""
        version = self.loadMetadata(path, self.sparkSession).get("engineVersion")
        try:
            stage = super().load(path)
            rows = self.sparkSession.read.parquet(f"{path.rstrip('/')}/{OBJECTS}").orderBy("number").collect()
            stage._set_values(load_pickle(b"".join(row.data for row in rows)))
        except Exception as error:
            if version == __version__:
                raise
            told = f"{path} was saved by version {version or 'unknown'}, and {__version__} cannot load it"
            raise LaunchError(f"{told}: {format_exception(error)}") from error
        return stage
