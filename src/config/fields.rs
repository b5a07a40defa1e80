//! Finds the fields of a type, for the error about an unknown field.
//!
//! The type is deserialized from a [`Guide`], which supplies only the keys on the path to the struct in question. It
//! stops there, with the field names that the struct asks for.

use std::{cell::Cell, iter::once};

use serde::{
    Deserializer,
    de::{
        DeserializeOwned, Error as _, IntoDeserializer, Visitor,
        value::{Error, MapDeserializer, SeqDeserializer},
    },
};

type Names = &'static [&'static str];

/// The fields of the struct at this path within a `T`. `None` if there is none, or if it accepts all names.
pub(super) fn of<T: DeserializeOwned>(path: &[String]) -> Option<Names> {
    let found = Cell::new(None);
    // This never produces a `T`.
    let _ = T::deserialize(Guide { path, found: &found });
    found.get()
}

#[derive(Clone, Copy)]
struct Guide<'a> {
    path: &'a [String],
    found: &'a Cell<Option<Names>>,
}

impl<'a> Guide<'a> {
    /// The next key, and the guide for the rest of the path.
    fn step(self) -> Result<(&'a str, Self), Error> {
        let (first, path) = self.path.split_first().ok_or_else(|| Error::custom("end of the path"))?;
        Ok((first, Self { path, ..self }))
    }
}

impl<'de> Deserializer<'de> for Guide<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_map(MapDeserializer::new(once(self.step()?)))
    }

    fn deserialize_struct<V: Visitor<'de>>(self, _: &str, fields: Names, visitor: V) -> Result<V::Value, Error> {
        if self.path.is_empty() {
            self.found.set(Some(fields));
        }
        self.deserialize_any(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &str, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_seq(SeqDeserializer::new(once(self.step()?.1)))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct tuple
        tuple_struct map enum identifier ignored_any
    }
}

impl IntoDeserializer<'_> for Guide<'_> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}
