"""Training: data, loss, optimiser, step, checkpoints and the loop that `deltanox train` runs."""

from deltanox.train._baselines import (
    gzip_bits_per_byte as gzip_bits_per_byte,
    markov_bits_per_byte as markov_bits_per_byte,
)
from deltanox.train._checkpoint import (
    Checkpoint as Checkpoint,
    find_checkpoint as find_checkpoint,
    load_arrays as load_arrays,
    save_checkpoint as save_checkpoint,
)
from deltanox.train._config import (
    config_from_dict as config_from_dict,
    config_to_dict as config_to_dict,
    read_config as read_config,
)
from deltanox.train._data import (
    Batch as Batch,
    Corpus as Corpus,
    DataPosition as DataPosition,
    TrainingData as TrainingData,
    validation_batches as validation_batches,
)
from deltanox.train._documents import (
    Document as Document,
    read_documents as read_documents,
    split_documents as split_documents,
    standard_library as standard_library,
)
from deltanox.train._log import read_log as read_log
from deltanox.train._loop import Result as Result, train as train
from deltanox.train._loss import (
    LossSums as LossSums,
    next_token_loss as next_token_loss,
)
from deltanox.train._optimiser import (
    decay_mask as decay_mask,
    learning_rate_schedule as learning_rate_schedule,
    make_optimiser as make_optimiser,
)
from deltanox.train._plot import plot_losses as plot_losses
from deltanox.train._ready import find_config as find_config, ready_configs as ready_configs
from deltanox.train._report import TrainingDiverged as TrainingDiverged
from deltanox.train._settings import (
    Config as Config,
    DataConfig as DataConfig,
    LoraConfig as LoraConfig,
    OptimiserConfig as OptimiserConfig,
    TrainConfig as TrainConfig,
)
from deltanox.train._step import (
    Metrics as Metrics,
    TrainState as TrainState,
    init_state as init_state,
    make_evaluation as make_evaluation,
    make_step as make_step,
    repeat_step as repeat_step,
)
from deltanox.train._vocabulary import (
    BOUNDARY as BOUNDARY,
    BYTES as BYTES,
    VOCABULARY_SIZE as VOCABULARY_SIZE,
    Vocabulary as Vocabulary,
    encode as encode,
    read_vocabulary as read_vocabulary,
)
