"""`cowrec prepare`: raw click logs to a data set, on this machine or a Dask cluster."""
