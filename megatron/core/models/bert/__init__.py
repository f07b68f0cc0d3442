"""BERT."""

from .bert_model import BertModel as BertModel
