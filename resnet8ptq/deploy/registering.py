"""Registers a run's model in MLflow's registry, under the alias `recommended`."""

from resnet8ptq.core.errors import TrackingError
from resnet8ptq.core.text import escape_markdown
from resnet8ptq.deploy.source import SourceRun
from resnet8ptq.report.answer import say_facts
from resnet8ptq.tracking.mlflow_store import mlflow_model
from resnet8ptq.tracking.mlflow_store.store import Store

ALIAS = "recommended"


def register(store: Store, source: SourceRun, name: str) -> str:
    """Register a run's model as the newest version of `name`, with the alias; return its URI.

    Raises:
        TrackingError: the run has no logged model, or the store cannot register it, for example
            because it has no registry.
    """
    client = store.client
    run_id = source.record.run_id
    model = mlflow_model.find_model(store, run_id)
    if model is None:
        raise TrackingError(f"register: run {run_id} has logged no model; try a new run")

    # Create the name at its first version, and move the alias last
    try:
        if not client.search_registered_models(f"name = '{name}'"):
            client.create_registered_model(name)
        store.locate(model.artifact_location)  # refuses an address outside of the store
        version = client.create_model_version(
            name,
            model.artifact_location,
            run_id,
            description=describe(source),
            model_id=model.model_id,
        ).version
        if source.use:
            client.set_model_version_tag(name, version, "use", source.use)
        client.set_registered_model_alias(name, ALIAS, version)
    except TrackingError as error:
        raise TrackingError(f"register: {name!r} cannot be registered ({error})") from error
    return f"models:/{name}@{ALIAS}"


def describe(source: SourceRun) -> str:
    """Return the description of a version, as one paragraph of Markdown."""
    record = source.record
    name = ", ".join(filter(None, [record.model, *record.combination.cells]))
    facts = [f"{name}, on {record.dataset}", *say_facts(record)]
    if record.verdict_text:
        facts.append(f"verdict on the loss: {record.verdict_text}")
    return escape_markdown("; ".join([*facts, f"run {record.name} ({record.run_id})"]))
