//! [`Layer`]: the values of one source, and their locations in it.

use std::{
    cell::Cell,
    collections::BTreeMap,
    ffi::OsString,
    fmt,
    panic::Location,
    path::{Path, PathBuf},
};

use figment::{
    Metadata, Profile, Provider,
    value::{Dict, Map, Value},
};
use serde::Serialize;
use toml::de::{DeTable, DeValue};

use super::{
    document::{self, Document, is_beyond},
    limited::Limited,
};
use crate::error::{Error, ErrorKind, Result};

/// The key under which `toml` passes a date to deserializers of other types.
const DATE: &str = "$__toml_private_datetime";

#[derive(Clone, Debug)]
pub(super) enum SourceLocation {
    File(PathBuf),
    /// All variables with this prefix.
    Environment(String),
    Variable(String),
    Program(&'static Location<'static>),
}

pub(super) struct Layer {
    place: SourceLocation,
    values: Dict,
    lines: BTreeMap<String, usize>,
}

impl Layer {
    pub(super) fn empty(place: SourceLocation) -> Self {
        Self { place, values: Dict::new(), lines: BTreeMap::new() }
    }

    pub(super) fn file(path: &Path) -> Result<Self> {
        let refused = |cause: Box<dyn std::error::Error + Send + Sync>| {
            Error::new(ErrorKind::Setup, format!("configuration of {} could not be read", path.display()))
                .because(cause)
        };
        let text = std::fs::read_to_string(path).map_err(|error| refused(error.into()))?;
        let document = Document::parse(&text).map_err(|error| refused(error.into()))?;
        if let Some(start) = document.beyond(document::MOST) {
            let place = format!("configuration of {}:{}", path.display(), line_of(&text, start));
            return Err(Error::new(ErrorKind::Setup, too_deep(&place)));
        }
        let mut values: Dict = toml::from_str(&text).map_err(|error| refused(error.into()))?;
        values.values_mut().for_each(dates);
        let mut lines = BTreeMap::new();
        let ends: Vec<_> = text.match_indices('\n').map(|(at, _)| at).collect();
        note_lines(&ends, "", document.table(), &mut lines);
        Ok(Self { place: SourceLocation::File(path.into()), values, lines })
    }

    fn one(key: &str, value: Value, place: SourceLocation) -> Result<Self> {
        let mut names = key.rsplit('.');
        if key.split('.').any(str::is_empty) {
            let text =
                format!("{place} sets `{key}`, which is not a valid key: a key is non-empty names joined by dots");
            return Err(Error::new(ErrorKind::Setup, text));
        }
        if key.split('.').nth(document::MOST).is_some() {
            let most = document::MOST;
            let text = format!("{place} sets a key of more than {most} parts: no setting is that deep");
            return Err(Error::new(ErrorKind::Setup, text));
        }
        let mut values = Dict::new();
        if let Some(last) = names.next() {
            values.insert(last.into(), value);
        }
        let values = names.fold(values, |inner, name| Dict::from([(name.into(), Value::from(inner))]));
        Ok(Self { place, values, lines: BTreeMap::new() })
    }

    pub(super) fn set(key: &str, value: impl Serialize, caller: &'static Location<'static>) -> Result<Self> {
        let place = SourceLocation::Program(caller);
        let too_deep = || Error::new(ErrorKind::Setup, too_deep(&format!("{place} sets `{key}`")));
        let beyond = Cell::new(false);
        let value = Value::serialize(Limited::new(value, &beyond)).map_err(|error| {
            if beyond.get() {
                return too_deep();
            }
            let text = format!("{place} sets `{key}` to a value that a TOML file cannot express");
            Error::new(ErrorKind::Setup, text).because(error)
        })?;
        if is_beyond(&value, levels_left(key)) {
            return Err(too_deep());
        }
        Self::one(key, value, place)
    }

    /// The location of a key, if this layer sets it.
    pub(super) fn at(&self, keys: &[String]) -> Option<String> {
        find(&self.values, keys)?;
        Some(match self.lines.get(&joined(keys)) {
            Some(line) => format!("{}:{line}", self.place),
            None => self.place.to_string(),
        })
    }

    /// The name of the environment variable, if this layer comes from one.
    pub(super) fn variable(&self) -> Option<&str> {
        match &self.place {
            SourceLocation::Variable(name) => Some(name),
            _ => None,
        }
    }

    /// Describes how this source could set a key.
    pub(super) fn way_to_set(&self, keys: &[String]) -> Option<String> {
        match &self.place {
            SourceLocation::File(path) => Some(format!("in {}", path.display())),
            SourceLocation::Environment(prefix) => {
                Some(format!("by the variable `{prefix}_{}`", keys.join("__").to_ascii_uppercase()))
            }
            SourceLocation::Variable(_) | SourceLocation::Program(_) => None,
        }
    }
}

/// One layer for each variable with this prefix, sorted by name.
pub(super) fn variables(prefix: &str, all: impl Iterator<Item = (OsString, OsString)>) -> Result<Vec<Layer>> {
    let mut found = BTreeMap::new();
    for (name, value) in all {
        let Some(name) = name.to_str() else { continue };
        let Some(key) = name.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('_')) else { continue };
        let place = SourceLocation::Variable(name.into());
        let Some(value) = value.to_str() else {
            return Err(Error::new(ErrorKind::Setup, format!("{place} is not UTF-8")));
        };
        let key = key.to_ascii_lowercase().replace("__", ".");
        let Some(value) = parsed(value, levels_left(&key)) else {
            return Err(Error::new(ErrorKind::Setup, too_deep(&format!("{place} sets `{key}`"))));
        };
        found.insert(name.to_string(), Layer::one(&key, value, place)?);
    }
    Ok(found.into_values().collect())
}

/// The number of levels that a value under this key may have. At least one: a key that is too long is a separate error.
fn levels_left(key: &str) -> usize {
    (document::MOST + 1).saturating_sub(key.split('.').count()).max(1)
}

fn too_deep(place: &str) -> String {
    let most = document::MOST;
    format!(
        "{place}: tables and arrays are nested more than {most} levels deep, counting the parts of their key: no setting \
         is that deep, so use fewer levels"
    )
}

/// Parses a variable's value as TOML or, if it is not TOML, takes it as a string. `None` if it has more than `levels`.
fn parsed(text: &str, levels: usize) -> Option<Value> {
    let line = format!("value = {text}");
    let document = Document::parse(&line).ok().filter(|document| document.table().len() == 1);
    if document.as_ref().is_some_and(|document| document.beyond(levels).is_some()) {
        return None;
    }
    let one = document.and_then(|_| toml::from_str::<Dict>(&line).ok());
    let mut value = one.and_then(|mut values| values.remove("value")).unwrap_or_else(|| Value::from(text));
    dates(&mut value);
    Some(value)
}

/// Replaces dates by their text.
fn dates(value: &mut Value) {
    match value {
        Value::Dict(_, values) => match values.get(DATE).and_then(Value::as_str) {
            Some(date) => *value = Value::from(date),
            None => values.values_mut().for_each(dates),
        },
        Value::Array(_, values) => values.iter_mut().for_each(dates),
        _ => {}
    }
}

pub(super) fn find<'v>(values: &'v Dict, keys: &[String]) -> Option<&'v Value> {
    let (first, rest) = keys.split_first()?;
    rest.iter().try_fold(values.get(first)?, |value, key| value.as_dict()?.get(key))
}

/// Joins names to a key. A name with a dot in it is quoted, as in a file.
pub(super) fn joined(names: &[String]) -> String {
    names.iter().fold(String::new(), |key, name| within(&key, name))
}

pub(super) fn within(section: &str, name: &str) -> String {
    let dot = if section.is_empty() { "" } else { "." };
    if name.contains('.') { format!("{section}{dot}\"{name}\"") } else { format!("{section}{dot}{name}") }
}

/// Notes the line of each key. `ends`: the offsets of the line ends, in order.
fn note_lines(ends: &[usize], section: &str, table: &DeTable<'_>, lines: &mut BTreeMap<String, usize>) {
    for (name, value) in table {
        let key = within(section, name.get_ref());
        lines.insert(key.clone(), 1 + ends.partition_point(|end| *end < name.span().start));
        if let DeValue::Table(table) = value.get_ref() {
            note_lines(ends, &key, table, lines);
        }
    }
}

fn line_of(text: &str, at: usize) -> usize {
    1 + text.get(..at).unwrap_or_default().matches('\n').count()
}

impl Provider for Layer {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.place.to_string())
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        Ok(Map::from([(Profile::Default, self.values.clone())]))
    }
}

impl fmt::Display for SourceLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SourceLocation::File(path) => path.display().fmt(f),
            SourceLocation::Environment(prefix) => write!(f, "the variables `{prefix}_..`"),
            SourceLocation::Variable(name) => write!(f, "the variable `{name}`"),
            SourceLocation::Program(caller) => write!(f, "the program, {}:{}", caller.file(), caller.line()),
        }
    }
}

impl fmt::Debug for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Layer").field("place", &self.place).finish_non_exhaustive()
    }
}
