"""Files to token batches.

``files`` finds files, ``records`` and ``formats`` read what is in them: text (``sources``), or chats and
completions (``examples``, ``chat``), which ``tokenizer``, ``encoding`` and ``tokens`` turn into token ids on disk
(``token_files``). ``packing`` and ``documents`` cut these into sequences, ``loader`` does all of it, and
``batches`` hands the result out by step.
"""

from greedysnake.data.batches import DataReport, TokenBatches
from greedysnake.data.documents import CutReport, DocumentRows, document_rows, pack_pieces
from greedysnake.data.files import FileSurvey, Paths, SourceFile, survey_files
from greedysnake.data.formats import RecordFormat
from greedysnake.data.loader import check_sequence_length, load_data
from greedysnake.data.packing import EpochOrder, PackedSequences, pack, split_for_evaluation
from greedysnake.data.sources import load_documents
from greedysnake.data.token_files import TokenFile, TokenWriter
from greedysnake.data.tokenizer import (
    byte_tokenizer,
    check_vocabulary,
    load_tokenizer,
    token_id_bound,
    use_chat_template,
)
from greedysnake.data.tokens import tokenise_examples, tokenise_files, write_tokens

__all__ = [
    "CutReport",
    "DataReport",
    "DocumentRows",
    "EpochOrder",
    "FileSurvey",
    "PackedSequences",
    "Paths",
    "RecordFormat",
    "SourceFile",
    "TokenBatches",
    "TokenFile",
    "TokenWriter",
    "byte_tokenizer",
    "check_sequence_length",
    "check_vocabulary",
    "document_rows",
    "load_data",
    "load_documents",
    "load_tokenizer",
    "pack",
    "pack_pieces",
    "split_for_evaluation",
    "survey_files",
    "token_id_bound",
    "tokenise_examples",
    "tokenise_files",
    "use_chat_template",
    "write_tokens",
]
