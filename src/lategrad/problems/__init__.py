"""Problems to train on: data sets, models and their losses."""
