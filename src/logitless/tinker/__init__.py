"""The service of the Tinker SDK: bodies (`wire`), losses, adapters on one base (`trainer`), files (`store`), sessions
and order (`service`), HTTP (`app`)."""
