"""Export to OpenTelemetry by its SDK: metrics and spans of steps, over OTLP/HTTP. Its packages are needed when used."""
