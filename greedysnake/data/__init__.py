"""Text to token batches.

``files`` finds text, ``sources`` reads its documents, ``tokenizer`` and ``tokens`` turn them into token ids
on disk, ``packing`` cuts these into sequences, and ``loader`` hands them out by step.
"""

from greedysnake.data.files import FileSurvey, Paths, SourceFile, survey_files
from greedysnake.data.loader import DataReport, TokenBatches, check_sequence_length, load_data
from greedysnake.data.packing import EpochOrder, PackedSequences, pack, split_for_evaluation
from greedysnake.data.sources import load_documents
from greedysnake.data.tokenizer import byte_tokenizer, check_vocabulary, load_tokenizer
from greedysnake.data.tokens import TokenFile, tokenise_files, write_tokens

__all__ = [
    "DataReport",
    "EpochOrder",
    "FileSurvey",
    "PackedSequences",
    "Paths",
    "SourceFile",
    "TokenBatches",
    "TokenFile",
    "byte_tokenizer",
    "check_sequence_length",
    "check_vocabulary",
    "load_data",
    "load_documents",
    "load_tokenizer",
    "pack",
    "split_for_evaluation",
    "survey_files",
    "tokenise_files",
    "write_tokens",
]
