//! [`Document`]: parsed TOML of any depth. A [`Dict`](figment::value::Dict) made of it is read, merged and dropped
//! recursively, so the depth is checked first. The document itself is dropped without recursion.

use std::mem;

use figment::value::Value;
use toml::de::{DeTable, DeValue, Error};

/// The maximum nesting of tables and arrays. The parser limits each key and each value, but not both together.
pub(super) const MOST: usize = 64;

pub(super) struct Document<'i>(DeTable<'i>);

impl<'i> Document<'i> {
    pub(super) fn parse(text: &'i str) -> Result<Self, Error> {
        // `DeTable::parse` drops the parsed part recursively on an error.
        let (table, errors) = DeTable::parse_recoverable(text);
        let document = Self(table.into_inner());
        errors.into_iter().next().map_or(Ok(document), Err)
    }

    pub(super) fn table(&self) -> &DeTable<'i> {
        &self.0
    }

    /// The offset of a key or an element that is nested deeper than `most`. A top-level key has depth 1.
    pub(super) fn beyond(&self, most: usize) -> Option<usize> {
        let mut open: Vec<_> = self.0.iter().map(|(name, value)| (1, name.span().start, value)).collect();
        while let Some((depth, start, value)) = open.pop() {
            if depth > most {
                return Some(start);
            }
            match value.get_ref() {
                DeValue::Table(table) => {
                    open.extend(table.iter().map(|(name, value)| (depth + 1, name.span().start, value)));
                }
                DeValue::Array(array) => {
                    open.extend(array.iter().map(|value| (depth + 1, value.span().start, value)));
                }
                _ => {}
            }
        }
        None
    }
}

impl Drop for Document<'_> {
    fn drop(&mut self) {
        let mut open: Vec<_> = mem::take(&mut self.0).into_iter().map(|(_, value)| value).collect();
        while let Some(value) = open.pop() {
            match value.into_inner() {
                DeValue::Table(table) => open.extend(table.into_iter().map(|(_, value)| value)),
                DeValue::Array(array) => open.extend(array),
                _ => {}
            }
        }
    }
}

/// True if a value contains others that are nested deeper than `most`. The value itself has depth 1.
pub(super) fn is_beyond(value: &Value, most: usize) -> bool {
    let mut open = vec![(1, value)];
    while let Some((depth, value)) = open.pop() {
        if depth > most {
            return true;
        }
        match value {
            Value::Dict(_, values) => open.extend(values.values().map(|value| (depth + 1, value))),
            Value::Array(_, values) => open.extend(values.iter().map(|value| (depth + 1, value))),
            _ => {}
        }
    }
    false
}
